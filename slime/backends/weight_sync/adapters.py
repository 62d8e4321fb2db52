"""Adapter-only weight sync: engines keep the base model and get low-rank adapters by name.

An engine on the trainer's node gets them through shared memory, another one as PEFT folders that it can see. A name is unloaded
and loaded anew: engines have no way to change an adapter in place. Called while the engines are paused, so requests that were
put back go on with the new one. It does not know what trains the adapters.
"""

from __future__ import annotations

import os
import shutil
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from slime.utils import peft_format, tensor_wire
from slime.utils.checksum import tensor_checksum
from slime.utils.engine_client import EngineError

if TYPE_CHECKING:
    import torch

    from slime.utils.engine_client import EngineClient


@dataclass
class AdapterSender:
    """Gives adapters to engines.

    Args:
        host: address of the trainer's node; engines there share its memory.
        ranks_per_engine: devices of one engine; each gets a handle of its own.
        folder: for engines of other nodes, which have to see it.
    """

    config: dict
    host: str
    ranks_per_engine: int
    folder: str
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)
    _paths: set[str] = field(default_factory=set, repr=False)

    def send(self, client: EngineClient, adapters: dict[str, dict[str, torch.Tensor]], version: str) -> None:
        """Have the engine serve these adapters, and report `version`."""
        for name, tensors in adapters.items():
            _unload(client, name)
            if urlsplit(client.base_url).hostname == self.host.strip("[]"):
                payload = tensor_wire.flatten(list(tensors.items()))
                texts = [tensor_wire.serialize(payload) for _ in range(self.ranks_per_engine)]
                client.load_lora_adapter_from_tensors(
                    name, self.config, texts, load_format=tensor_wire.FLATTENED_BUCKET
                )
            else:
                client.load_lora_adapter(name, self._written(name, tensors, version))
        client.update_weight_version(version)

    def _written(self, name: str, tensors: dict[str, torch.Tensor], version: str) -> str:
        """Write a version once for all engines, which ask from a thread each; what an earlier run left is replaced."""
        path = os.path.join(self.folder, f"{name}-v{version}")
        with self._lock:
            if path not in self._paths:
                shutil.rmtree(path, ignore_errors=True)
                peft_format.write_adapter(path, self.config, tensors)
                self._paths.add(path)
        return path


def _unload(client: EngineClient, name: str) -> None:
    try:
        client.unload_lora_adapter(name)
    except EngineError as error:
        if error.status != 400:  # the first time there is none of that name
            raise


def check_adapters(clients: list[EngineClient], adapters: dict[str, dict[str, torch.Tensor]]) -> None:
    """Compare what each engine holds with what was sent (`--check-weight-update-equal`); SGLang does not tell.

    Raises: RuntimeError naming engine, adapter and the first tensors that differ.
    """
    for client in clients:
        reply = client.weights_checker("checksum")
        if "checksums" not in reply:
            continue
        held = reply.get("adapters", {})
        for name, tensors in adapters.items():
            own = held.get(name, {})
            wrong = [key for key, tensor in tensors.items() if own.get(key) != tensor_checksum(tensor)]
            if wrong:
                raise RuntimeError(
                    f"--check-weight-update-equal: adapter {name} of engine {client.base_url} differs from the trainer's in "
                    f"{len(wrong)} of {len(tensors)} tensors, first: {wrong[:3]}"
                )
