"""Weight updates of the serving engine: from a process group, from tensors or from disk, and the checker.

Invariants: a request that is refused or fails leaves all weights as they were. A broadcast that was announced with names
or shapes that do not fit is still received (and dropped), so the sender is not left hanging and the group stays usable;
a group whose broadcast timed out is dropped. Distributed and tensor updates are taken only between `begin` and `end`.
Called on the engine thread, except `init_group`, which may wait for peers and therefore runs elsewhere.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any

import torch

from slime.engine.weights import Weights
from slime.utils import device, tensor_wire
from slime.utils.process_groups import destroy_process_group, init_process_group, wire_view
from slime.utils.sglang_checksum import overall_checksum, sglang_checksums

logger = logging.getLogger(__name__)

CHECKER_ACTIONS = ("checksum", "snapshot", "reset_tensors", "compare")
_DTYPES = {
    name: getattr(torch, name)
    for name in ("float32", "float16", "bfloat16", "float64", "int64", "int32", "uint8", "float8_e4m3fn")
}


class UpdateRefused(Exception):
    """An update that did not happen; the message goes to the caller with status 400."""


class WeightUpdates:
    """The groups this engine is in and the update in progress."""

    def __init__(self, weights: Weights, timeout_s: float, adapter_checksums: Callable[[], dict] = dict):
        self._weights, self._timeout_s, self._adapter_checksums = weights, timeout_s, adapter_checksums
        self._groups: dict[str, Any] = {}
        self._lock = threading.Lock()
        self.in_progress = False

    def begin(self) -> None:
        """Open the window in which distributed and tensor updates are accepted. A window left open by a failed sync is reused."""
        self.in_progress = True

    def end(self) -> None:
        """Raises: UpdateRefused when quantised weights came in part only; they are as they were."""
        self.in_progress = False
        missing = self._weights.incomplete()
        if missing:
            raise UpdateRefused(f"{len(missing)} quantised weights came without all their parts, first {missing[0]!r}")

    def init_group(
        self, master_address: str, master_port: int, rank: int, world_size: int, group_name: str, backend: str
    ) -> None:
        """Join a group of the trainer; a former group of the same name is left first.

        Raises: UpdateRefused when the others do not come within the time-out.
        """
        if backend not in ("gloo", "nccl"):
            raise UpdateRefused(f"backend {backend!r}: expected gloo or nccl")
        self.destroy_group(group_name)
        address = f"[{master_address}]" if ":" in master_address else master_address
        try:
            group = init_process_group(
                backend, f"tcp://{address}:{master_port}", world_size, rank, group_name, self._timeout_s
            )
        except RuntimeError as error:
            raise UpdateRefused(str(error)) from error
        with self._lock:
            self._groups[group_name] = group

    def destroy_group(self, group_name: str) -> bool:
        """Leave a group; returns False when there is none of that name."""
        with self._lock:
            group = self._groups.pop(group_name, None)
        if group is None:
            return False
        destroy_process_group(group)
        return True

    def from_distributed(self, names: list[str], dtypes: list[str], shapes: list[list[int]], group_name: str) -> None:
        """Receive one broadcast from rank 0 per name, in order, then apply all of them.

        Raises: UpdateRefused; the weights are then unchanged.
        """
        if not self.in_progress:
            raise UpdateRefused("update_weights_from_distributed outside begin_weight_update and end_weight_update")
        if not len(names) == len(dtypes) == len(shapes):
            raise UpdateRefused(
                f"{len(names)} names, {len(dtypes)} dtypes, {len(shapes)} shapes: lengths must be equal"
            )
        with self._lock:
            group = self._groups.get(group_name)
        if group is None:
            raise UpdateRefused(f"no weight update group {group_name!r}; there are {sorted(self._groups)}")
        received = self._receive(names, dtypes, shapes, group_name, group)
        try:
            self._weights.assign(received)
        except ValueError as error:
            raise UpdateRefused(str(error)) from error

    def from_tensor(self, serialized: list[str], load_format: str | None) -> int:
        """Copy tensors of another process of this machine, one serialized payload per engine rank. Returns how many.

        Raises: UpdateRefused, also for a payload that holds anything but tensors; the weights are then unchanged.
        """
        if not self.in_progress:
            raise UpdateRefused("update_weights_from_tensor outside begin_weight_update and end_weight_update")
        if len(serialized) != 1 or not isinstance(serialized[0], str):
            raise UpdateRefused(
                f"serialized_named_tensors must hold one string, for the one rank; got {len(serialized)}"
            )
        try:
            return self._copy_from(serialized[0], load_format)
        except ValueError as error:
            problem = str(error)
        raise UpdateRefused(problem)  # outside the handler: frames of the first error would hold the sender's memory

    def _copy_from(self, serialized: str, load_format: str | None) -> int:
        tensors = dict(tensor_wire.named_tensors_of(tensor_wire.deserialize(serialized), load_format))
        self._weights.assign(tensors)
        device.synchronize()  # the sender may drop its buffer once it is answered
        return len(tensors)

    def from_disk(self, model_path: str) -> None:
        """Read all weights from a Hugging Face folder.

        Raises: UpdateRefused; the weights are then unchanged.
        """
        try:
            self._weights.load(model_path)
        except Exception as error:  # unreadable files raise what the safetensors library likes
            raise UpdateRefused(f"update from {model_path} failed: {error}") from error

    def check(self, action: str) -> dict[str, Any]:
        """Run a checker action; returns what belongs into the reply.

        Raises: UpdateRefused for an unknown action, and for `compare` when weights differ or nothing was kept.
        """
        if action == "checksum":
            adapters = self._adapter_checksums()
            own = {"adapters": adapters} if adapters else {}
            return {"checksums": self._weights.checksums(), **own, **self._sglang_checksums()}
        if action == "snapshot":
            self._weights.take_snapshot()
        elif action == "reset_tensors":
            self._weights.scramble()
        elif action == "compare":
            self._compare()
        else:
            raise UpdateRefused(f"action {action!r}: expected one of {', '.join(CHECKER_ACTIONS)}")
        return {}

    def _sglang_checksums(self) -> dict[str, Any]:
        """Return what SGLang's own reply holds: checksums under its names, for its one rank."""
        checksums = sglang_checksums((name, self._weights.view(name)) for name in self._weights.names)
        overall = overall_checksum(checksums)
        sizes = dict.fromkeys(("tp", "dp", "pp"))
        place = {f"{name}_rank": 0 for name in sizes} | {f"{name}_size": 1 for name in sizes}
        rank = {"checksums": checksums, "per_gpu_checksum": overall}
        rank["parallelism_info"] = [{"role": "target", **place, "rank": 0, "size": 1}]
        return {"ranks": [rank], "per_engine_checksum": overall}

    def _compare(self) -> None:
        try:
            different = self._weights.differing_from_snapshot()
        except ValueError as error:
            raise UpdateRefused(str(error)) from error
        if different:
            shown = ", ".join(different[:5])
            raise UpdateRefused(f"{len(different)} of {len(self._weights.names)} weights differ: {shown}")

    def _receive(
        self, names: list[str], dtypes: list[str], shapes: list[list[int]], group_name: str, group: Any
    ) -> dict[str, torch.Tensor]:
        import torch.distributed as dist

        tensors = [
            torch.empty(tuple(shape), dtype=_DTYPES[dtype.removeprefix("torch.")], device=self._weights.device)
            for shape, dtype in zip(shapes, dtypes, strict=True)
        ]
        try:
            for work in [dist.broadcast(wire_view(tensor), src=0, group=group, async_op=True) for tensor in tensors]:
                work.wait()
        except RuntimeError as error:
            self.destroy_group(group_name)
            raise UpdateRefused(
                f"receiving {len(names)} weights over group {group_name!r} failed, the group is dropped: {error}"
            ) from error
        return dict(zip(names, tensors, strict=True))


def _check_announcement(names: list[str], dtypes: list[str], shapes: list[list[int]]) -> None:
    """Raises: UpdateRefused when the lists cannot describe broadcasts."""
    if not len(names) == len(dtypes) == len(shapes):
        raise UpdateRefused(f"{len(names)} names, {len(dtypes)} dtypes, {len(shapes)} shapes: lengths must be equal")
    if len(set(map(str, names))) != len(names):
        raise UpdateRefused("a name is announced twice in one update")
    for name, dtype, shape in zip(names, dtypes, shapes, strict=True):
        if not isinstance(dtype, str) or dtype.removeprefix("torch.") not in _DTYPES:
            raise UpdateRefused(f"weight {name!r} has dtype {dtype!r}, expected one of {', '.join(_DTYPES)}")
        if not isinstance(shape, list) or not all(type(size) is int and size >= 0 for size in shape):
            raise UpdateRefused(f"weight {name!r} has shape {shape!r}, expected a list of sizes")
