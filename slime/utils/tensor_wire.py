"""Named tensors handed to another process of the same machine, in SGLang's wire format: base64 of a pickle of handles.

The bytes travel through shared memory (CUDA IPC beside a GPU); the pickle holds handles and metadata only. Invariants: only
what `deserialize` lists can be unpickled, everything else is a ValueError that names it; tensors read from a payload are
views of the sender's memory, so they must be copied before the sender is answered, and the sender keeps its buffer until
then. CPU tensors use the `file_system` strategy: unrelated processes cannot exchange file descriptors.
Does not know models, engines or HTTP.
"""

from __future__ import annotations

import base64
import io
import pickle
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    NamedTensors = Sequence[tuple[str, torch.Tensor]]

FLATTENED_BUCKET = "flattened_bucket"
LOAD_FORMATS = (None, FLATTENED_BUCKET)
_ALIGN = 16  # bytes; a reader views the slice in its own dtype
_strategy_lock = threading.Lock()  # torch has one strategy per process; engines are served from a thread each


@dataclass(frozen=True)
class Slot:
    """Where one tensor lies in a flattened bucket: bytes start..end."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    start: int
    end: int


def flatten(named_tensors: NamedTensors, buffer: torch.Tensor | None = None) -> dict[str, Any]:
    """Copy tensors of one device behind each other into a buffer that other processes can open.

    Args:
        buffer: of an earlier payload, to write over if it is large enough; else a new one is made.
    Returns: the payload of a `flattened_bucket` request: {"flattened_tensor": uint8 [bytes], "metadata": one entry per tensor}.
    """
    import torch

    slots = _lay_out(named_tensors)
    device = named_tensors[0][1].device if named_tensors else torch.device("cpu")
    size = slots[-1].end if slots else 0
    flat = _shared_bytes(size, device) if buffer is None or len(buffer) < size else buffer[:size]
    for slot, (_, tensor) in zip(slots, named_tensors, strict=True):
        flat[slot.start : slot.end].view(slot.dtype).view(slot.shape).copy_(tensor)
    return {"flattened_tensor": flat, "metadata": [_metadata(slot) for slot in slots]}


def flat_bytes(named_tensors: NamedTensors) -> int:
    """Return the size of the buffer that `flatten` makes."""
    slots = _lay_out(named_tensors)
    return slots[-1].end if slots else 0


def serialize(payload: Any) -> str:
    """Return the text that stands for `payload` in a request. Each text can be opened once: make one per receiver.

    CPU tensors in it move to shared memory in place, so hand over copies, never live parameters.
    """
    from multiprocessing.reduction import ForkingPickler

    import torch.multiprocessing.reductions  # noqa: F401  registers how tensors are pickled

    buffer = io.BytesIO()
    with _file_system_strategy():
        ForkingPickler(buffer).dump(payload)
    return base64.b64encode(buffer.getvalue()).decode("ascii")


def deserialize(text: str) -> Any:
    """Open what `serialize` (or SGLang's MultiprocessingSerializer) made.

    Raises: ValueError for anything but tensors, their metadata and plain containers, and for what cannot be opened.
    """
    try:
        raw = base64.b64decode(text, validate=True)
        return _RestrictedUnpickler(io.BytesIO(raw)).load()
    except RefusedPickle as error:
        raise ValueError(f"serialized tensors: refused to unpickle {error}") from None
    except Exception as error:  # a broken pickle raises whatever its opcodes lead to
        raise ValueError(f"serialized tensors cannot be opened: {type(error).__name__}: {error}") from error


def named_tensors_of(payload: Any, load_format: str | None) -> list[tuple[str, torch.Tensor]]:
    """Return the (name, tensor) pairs of an opened payload: a plain list of pairs, or a flattened bucket.

    Raises: ValueError when the payload does not have the form that `load_format` says.
    """
    if load_format not in LOAD_FORMATS:
        raise ValueError(f"load_format {load_format!r}: expected null or {FLATTENED_BUCKET}")
    pairs = _unflatten(payload) if load_format == FLATTENED_BUCKET else _plain(payload)
    names = [name for name, _ in pairs]
    if len(set(names)) != len(names):
        raise ValueError("a tensor is named twice in one request")
    return pairs


# ---- flattened buckets ----


def _lay_out(named_tensors: NamedTensors) -> list[Slot]:
    slots, end = [], 0
    for name, tensor in named_tensors:
        start = -(-end // _ALIGN) * _ALIGN
        end = start + tensor.numel() * tensor.element_size()
        slots.append(Slot(name, tuple(tensor.shape), tensor.dtype, start, end))
    return slots


def _metadata(slot: Slot) -> SimpleNamespace:
    """SGLang reads these attributes, and its unpickler admits this class without SGLang being installed here."""
    import torch

    size = slot.end - slot.start
    return SimpleNamespace(
        name=slot.name,
        shape=torch.Size(slot.shape),
        dtype=slot.dtype,
        start_idx=slot.start,
        end_idx=slot.end,
        numel=size,
    )


def _shared_bytes(size: int, device: torch.device) -> torch.Tensor:
    import torch

    if device.type != "cpu" or size == 0:
        return torch.empty(size, dtype=torch.uint8, device=device)
    # Made in shared memory at once: sharing an ordinary tensor would copy it.
    storage = torch.UntypedStorage._new_using_filename_cpu(size)
    return torch.empty(0, dtype=torch.uint8).set_(storage, 0, (size,), (1,))


def _unflatten(payload: Any) -> list[tuple[str, torch.Tensor]]:
    import torch

    if not isinstance(payload, dict) or not {"flattened_tensor", "metadata"} <= payload.keys():
        raise ValueError(
            f"a {FLATTENED_BUCKET} is a dict of flattened_tensor and metadata, got {type(payload).__name__}"
        )
    flat, metadata = payload["flattened_tensor"], payload["metadata"]
    if not isinstance(flat, torch.Tensor) or not isinstance(metadata, (list, tuple)):
        raise ValueError(f"flattened_tensor is a {type(flat).__name__} and metadata a {type(metadata).__name__}")
    flat = flat.reshape(-1).view(torch.uint8)
    return [(slot.name, _slice(flat, slot)) for slot in map(_read_slot, metadata)]


def _read_slot(entry: Any) -> Slot:
    import torch

    try:
        slot = Slot(entry.name, tuple(entry.shape), entry.dtype, entry.start_idx, entry.end_idx)
    except (AttributeError, TypeError) as error:
        raise ValueError(f"metadata entry of type {type(entry).__name__} is not one of a tensor: {error}") from None
    integers = (*slot.shape, slot.start, slot.end)
    if not (
        isinstance(slot.name, str) and isinstance(slot.dtype, torch.dtype) and all(type(i) is int for i in integers)
    ):
        raise ValueError(f"metadata of {slot.name!r} is malformed: {slot}")
    return slot


def _slice(flat: torch.Tensor, slot: Slot) -> torch.Tensor:
    import math

    expected = math.prod(slot.shape) * slot.dtype.itemsize
    if min(slot.shape, default=0) < 0 or not 0 <= slot.start <= slot.end <= flat.numel():
        raise ValueError(f"{slot.name!r} lies at bytes {slot.start} to {slot.end} of a bucket of {flat.numel()} bytes")
    if slot.end - slot.start != expected:
        raise ValueError(
            f"{slot.name!r} has {slot.end - slot.start} bytes, {list(slot.shape)} {slot.dtype} needs {expected}"
        )
    part = flat[slot.start : slot.end]
    if (flat.storage_offset() + slot.start) % slot.dtype.itemsize:
        part = part.clone()
    return part.view(slot.dtype).view(slot.shape)


def _plain(payload: Any) -> list[tuple[str, torch.Tensor]]:
    import torch

    def is_pair(item: Any) -> bool:
        is_two = isinstance(item, (tuple, list)) and len(item) == 2
        return is_two and isinstance(item[0], str) and isinstance(item[1], torch.Tensor)

    if not isinstance(payload, (list, tuple)) or not all(map(is_pair, payload)):
        raise ValueError(f"expected a list of (name, tensor) pairs, got {type(payload).__name__}")
    return [(name, tensor) for name, tensor in payload]


# ---- pickles ----


class RefusedPickle(Exception):
    """A class or function that a payload of tensors has no business to name."""


class _Frozen:
    """A callable on which a pickle can set nothing."""

    __slots__ = ("_function",)

    def __init__(self, function: Callable):
        object.__setattr__(self, "_function", function)

    def __call__(self, *args: Any) -> Any:
        return self._function(*args)

    def __setattr__(self, name: str, value: Any) -> None:
        raise RefusedPickle(f"an assignment to {name}")


class _RestrictedUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        try:
            return _allowed()[module, name]
        except KeyError:
            raise RefusedPickle(f"{module}.{name}") from None


@cache
def _allowed() -> dict[tuple[str, str], Any]:
    """What a payload may name. Classes that are only passed on as arguments are replaced by their names."""
    import torch

    functions = {
        "rebuild_tensor": _tensor,
        "rebuild_storage_filename": _storage,
        "rebuild_storage_empty": _empty_storage,
        "rebuild_typed_storage": _typed_storage,
        "rebuild_cuda_tensor": _cuda_tensor,
    }
    allowed: dict[tuple[str, str], Any] = {
        ("torch.multiprocessing.reductions", name): _Frozen(function) for name, function in functions.items()
    }
    for module, name in (
        ("torch", "Tensor"),
        ("torch._tensor", "Tensor"),
        ("torch.nn.parameter", "Parameter"),
        ("torch", "UntypedStorage"),
        ("torch.storage", "UntypedStorage"),
        ("torch.storage", "TypedStorage"),
    ):
        allowed[module, name] = name
    for module in ("sglang.srt.weight_sync.tensor_bucket", "sglang.srt.model_executor.model_runner"):
        allowed[module, "FlattenedTensorMetadata"] = SimpleNamespace
    allowed["types", "SimpleNamespace"] = SimpleNamespace
    allowed["torch", "Size"] = torch.Size
    allowed |= {("torch", name): value for name, value in vars(torch).items() if isinstance(value, torch.dtype)}
    return allowed


def _tensor(_cls: str, storage: Any, metadata: tuple) -> torch.Tensor:
    import torch

    offset, size, stride, _requires_grad = metadata
    return torch._utils._rebuild_tensor(storage, offset, size, stride)


def _storage(_cls: str, manager: bytes, handle: bytes, size: int, dtype: torch.dtype | None = None) -> Any:
    import torch
    from torch.multiprocessing import reductions

    return reductions.rebuild_storage_filename(torch.UntypedStorage, manager, handle, size, dtype)


def _empty_storage(_cls: str) -> torch.UntypedStorage:
    import torch

    return torch.UntypedStorage()


def _typed_storage(storage: torch.UntypedStorage, dtype: torch.dtype) -> torch.TypedStorage:
    from torch.multiprocessing import reductions

    return reductions.rebuild_typed_storage(storage, dtype)


def _cuda_tensor(_cls: str, size, stride, offset, storage_cls: str, *rest: Any) -> torch.Tensor:
    import torch
    from torch.multiprocessing import reductions

    storage = {"TypedStorage": torch.TypedStorage, "UntypedStorage": torch.UntypedStorage}[storage_cls]
    return reductions.rebuild_cuda_tensor(torch.Tensor, size, stride, offset, storage, *rest)


@contextmanager
def _file_system_strategy() -> Iterator[None]:
    import torch.multiprocessing as multiprocessing

    with _strategy_lock:
        before = multiprocessing.get_sharing_strategy()
        multiprocessing.set_sharing_strategy("file_system")
        try:
            yield
        finally:
            multiprocessing.set_sharing_strategy(before)
