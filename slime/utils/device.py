"""The accelerator of this process: the only module that names cuda.

Invariants: nothing is queried at import; without an accelerator every function has a CPU meaning, so callers never
branch on the kind of machine. Does not know Megatron, Ray or process ranks beyond the local index it is given.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def has_accelerator() -> bool:
    """Return whether tensors of this process live on a GPU."""
    import torch

    return torch.cuda.is_available()


def device() -> torch.device:
    """Return the torch device of this process (the current GPU, or the CPU)."""
    import torch

    return torch.device("cuda", torch.cuda.current_device()) if has_accelerator() else torch.device("cpu")


def set_local_device(local_rank: int) -> None:
    """Choose GPU `local_rank` (modulo the visible ones) for this process; nothing to choose on a CPU."""
    import torch

    if has_accelerator():
        torch.cuda.set_device(local_rank % torch.cuda.device_count())


def process_group_backend() -> str:
    """Return the torch.distributed backend that moves tensors of `device()`."""
    return "nccl" if has_accelerator() else "gloo"


def synchronize() -> None:
    """Wait for the kernels queued on this process's device."""
    import torch

    if has_accelerator():
        torch.cuda.synchronize()


def empty_cache() -> None:
    """Give cached device memory back to the driver; on a CPU, freed heap back to the system."""
    import torch

    from slime.utils import platform

    if has_accelerator():
        torch.cuda.empty_cache()
    else:
        platform.trim_heap()


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which this process multiplies matrices of `dtype`.

    x86 processors without bf16 instructions emulate them several times slower than float32, which is the more exact
    of the two; anywhere else it is `dtype` itself.
    """
    import platform

    import torch

    emulated = dtype == torch.bfloat16 and not has_accelerator() and platform.machine() in ("x86_64", "AMD64")
    if emulated and not (torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()):
        return torch.float32
    return dtype


def pin_host_memory() -> bool:
    """Return whether host copies should be page-locked (only useful beside a GPU)."""
    return has_accelerator()


def manual_seed_all(seed: int) -> None:
    """Seed the generators of the CPU and of every visible GPU."""
    import torch

    torch.manual_seed(seed)
    if has_accelerator():
        torch.cuda.manual_seed_all(seed)


def rng_state() -> torch.Tensor | None:
    """Return the state of the device generator, None when it is the CPU's own."""
    import torch

    return torch.cuda.get_rng_state() if has_accelerator() else None


def set_rng_state(state: torch.Tensor | None) -> None:
    """Restore a state returned by `rng_state`; a state saved on the other kind of machine is left out."""
    import torch

    if has_accelerator() and state is not None:
        torch.cuda.set_rng_state(state)


def memory_summary() -> dict[str, float]:
    """Return allocated and peak device memory in GiB; empty on a CPU."""
    import torch

    if not has_accelerator():
        return {}
    scale = 1 / 2**30
    return {
        "memory_allocated_gib": torch.cuda.memory_allocated() * scale,
        "memory_peak_gib": torch.cuda.max_memory_allocated() * scale,
    }
