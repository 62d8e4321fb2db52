"""After a weight update: does each engine hold what the trainer exports? (`--check-weight-update-equal`)

The embedded engine reports a checksum per Hugging Face name, SGLang on a CPU one per tensor of its own; both are computed
here from what is exported. SGLang's checksums on GPUs and of engines split over several are not known here: of such an
engine only the version is compared, and that is said.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import TYPE_CHECKING

from slime.utils.checksum import tensor_checksum
from slime.utils.sglang_checksum import sglang_checksums

if TYPE_CHECKING:
    import torch

    from slime.utils.engine_client import EngineClient

logger = logging.getLogger(__name__)

Export = Iterable[tuple[str, "torch.Tensor"]]


def check_engines(clients: list[EngineClient], export: Export, version: int) -> None:
    """Compare the exported weights with what each engine holds after the update to `version`.

    Walks the export once, whatever the engines.

    Raises: RuntimeError naming the engine and the first tensors that differ.
    """
    replies = [client.weights_checker("checksum") for client in clients]
    by_name, of_sglang = _both_checksums(export, with_sglang=any("checksums" not in reply for reply in replies))
    for client, reply in zip(clients, replies, strict=True):
        if "checksums" in reply:
            expected, held = by_name, reply["checksums"]
        else:
            expected, held = _held_by_sglang(client, reply, of_sglang)
        wrong = sorted(name for name, checksum in expected.items() if held.get(name) != checksum)
        if wrong:
            raise RuntimeError(
                f"--check-weight-update-equal: after the update to version {version} engine {client.base_url} "
                f"differs from the trainer in {len(wrong)} of {len(expected)} tensors, first: {wrong[:5]}"
            )


def _both_checksums(export: Export, with_sglang: bool) -> tuple[dict[str, str], dict[str, str]]:
    """Return the checksums by Hugging Face name, and by SGLang's when asked for, of one walk through the export."""
    by_name: dict[str, str] = {}

    def noted() -> Iterable[tuple[str, torch.Tensor]]:
        for name, tensor in export:
            by_name[name] = tensor_checksum(tensor)
            yield name, tensor

    if with_sglang:
        return by_name, sglang_checksums(noted())
    for _ in noted():
        pass
    return by_name, {}


def _held_by_sglang(
    client: EngineClient, reply: dict, expected: dict[str, str]
) -> tuple[dict[str, str], dict[str, str]]:
    """Return (expected, held) checksums of an SGLang server; empty ones when they cannot be compared."""
    info, ranks = client.server_info(), reply["ranks"]
    if info["device"] != "cpu" or len(ranks) != 1:
        logger.warning(
            "--check-weight-update-equal: engine %s runs on %d x %s, where its checksums cannot be computed by the "
            "trainer: only the weight version is compared",
            client.base_url,
            len(ranks),
            info["device"],
        )
        return {}, {}
    return expected, ranks[0]["checksums"]
