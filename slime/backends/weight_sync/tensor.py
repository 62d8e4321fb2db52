"""Transport through memory that trainer and engine share: for engines on the slots of this very rank.

Each bucket is copied once into a buffer (shared memory, or device memory beside a GPU), of which the engine gets a handle.
Invariants: the buffer lives until every engine has answered; it is written again only after all have taken what was in it, and
never after a failure, when one may still be reading.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from slime.backends.weight_sync.publisher import Submit, wait_all
from slime.utils import device, platform, tensor_wire

if TYPE_CHECKING:
    import torch

    from slime.backends.weight_sync.publisher import Bucket
    from slime.utils.engine_client import EngineClient


KEPT_BYTES = 64 << 20
"""Up to this size a buffer is kept for the next update: taking fresh shared memory costs five times as much as the copy into it."""


class TensorTransport:
    """Hands buckets to ``clients``, engines on the same node as this process.

    Args:
        ranks_per_engine: devices of one engine; each gets a handle of its own.
    """

    def __init__(self, clients: list[EngineClient], *, ranks_per_engine: int = 1, timeout_s: float):
        self.clients = clients
        self._ranks_per_engine, self._timeout_s = ranks_per_engine, timeout_s
        self._kept: torch.Tensor | None = None

    def connect(self, submit: Submit) -> None:
        """Nothing to do: a handle needs no connection."""

    def send(self, bucket: Bucket, version: str, submit: Submit) -> None:
        kept, self._kept = self._kept, None
        if kept is None or len(kept) < tensor_wire.flat_bytes(bucket):
            kept = None  # given back before a larger one is taken
            _check_room(bucket)
        payload = tensor_wire.flatten(bucket, kept)
        device.synchronize()
        handles = {
            id(client): [tensor_wire.serialize(payload) for _ in range(self._ranks_per_engine)]
            for client in self.clients
        }
        replies = submit(
            self.clients,
            lambda client: client.update_weights_from_tensor(
                handles[id(client)],
                load_format=tensor_wire.FLATTENED_BUCKET,
                weight_version=version,
            ),
        )
        wait_all(replies, self._timeout_s)
        whole = payload["flattened_tensor"] if kept is None else kept
        if whole.device.type == "cpu" and len(whole) <= KEPT_BYTES:
            self._kept = whole

    def disconnect(self, submit: Submit) -> None:
        """Nothing to do."""


def largest_bucket(buffer_bytes: int, num_senders: int) -> int:
    """Return the bound of a bucket when ``num_senders`` ranks of this node send at once: half of the shared memory at most."""
    if device.has_accelerator():
        return buffer_bytes
    return min(buffer_bytes, max(1, platform.shared_memory_free_bytes() // (2 * num_senders)))


def _check_room(bucket: Bucket) -> None:
    """A write beyond what shared memory holds would end this process with a bus error, so it is refused before."""
    if bucket[0][1].device.type != "cpu":
        return
    needed, free = tensor_wire.flat_bytes(bucket), platform.shared_memory_free_bytes()
    if needed > free:
        names = ", ".join(name for name, _ in bucket[:3])
        raise RuntimeError(
            f"a weight bucket of {needed} bytes ({names}, ...) does not fit into {platform.shared_memory_dir()}, {free} bytes are "
            "free: enlarge it (docker run --shm-size=2g) or lower --update-weight-buffer-size"
        )
