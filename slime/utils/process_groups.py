"""Process groups outside WORLD: one trainer rank together with engine processes, for weight broadcasts; reductions over any group;
the gloo group of all train ranks.

Invariants: works in a process that has a WORLD group and in one that has none, and never touches WORLD. The key prefixes
in the store are those of SGLang's `init_custom_process_group`, so either side may be SGLang.
Rank r of the group is source rank r in `torch.distributed.broadcast(tensor, src=r, group=group)`.
Does not know what is sent over the group.
"""

from __future__ import annotations

import threading
from datetime import timedelta
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch
    from torch.distributed import ProcessGroup

_creation_lock = threading.Lock()
"""torch keeps its groups in process-wide tables that are not safe against concurrent creation."""

_gloo_group: tuple[ProcessGroup, ProcessGroup] | None = None
"""(WORLD, the gloo group of its ranks)."""


def init_process_group(
    backend: str,
    init_method: str,
    world_size: int,
    rank: int,
    group_name: str,
    timeout_s: float = 120.0,
) -> ProcessGroup:
    """Join the group `group_name` and return it once all `world_size` members are there.

    Args:
        backend: gloo or nccl.
        init_method: tcp://HOST:PORT; rank 0 listens there.
        timeout_s: deadline of the rendezvous and of every later collective on the group.

    Raises: RuntimeError naming group, rank and deadline when the others do not show up.
    """
    from torch.distributed import Backend, PrefixStore
    from torch.distributed.rendezvous import rendezvous

    timeout = timedelta(seconds=timeout_s)
    try:
        store, rank, world_size = next(rendezvous(init_method, rank, world_size, timeout=timeout))
        store.set_timeout(timeout)
        with _creation_lock:
            return _create_group(
                Backend(backend), PrefixStore(group_name, store), world_size, rank, group_name, timeout
            )
    except (RuntimeError, ValueError) as error:
        raise RuntimeError(
            f"process group {group_name!r} (backend {backend}, {init_method}, rank {rank} of {world_size}) was not "
            f"formed within {timeout_s:g} s: {error}"
        ) from error


def reduce_over(group: ProcessGroup | None, op) -> Callable[[torch.Tensor], torch.Tensor]:
    """A function that gives a tensor reduced by `op` over the ranks of `group`; its argument stays as it is."""
    import torch.distributed as dist

    def reduce(x: torch.Tensor) -> torch.Tensor:
        x = x.clone()
        dist.all_reduce(x, op=op, group=group)
        return x

    return reduce


def init_gloo_group() -> ProcessGroup:
    """The gloo group of all ranks of WORLD, which every one of them has to ask for first: on a CPU it is WORLD itself."""
    import torch.distributed as dist

    global _gloo_group
    if _gloo_group is None or _gloo_group[0] is not dist.group.WORLD:  # WORLD was left, and another one joined
        is_gloo = dist.get_backend() == "gloo"
        _gloo_group = dist.group.WORLD, dist.group.WORLD if is_gloo else dist.new_group(backend="gloo")
    return _gloo_group[1]


def get_gloo_group() -> ProcessGroup:
    """The group for Python objects and CPU tensors of all train ranks, as `dist.all_gather_object(..., group=get_gloo_group())`.

    Raises: RuntimeError outside of train ranks.
    """
    import torch.distributed as dist

    if _gloo_group is None or _gloo_group[0] is not dist.group.WORLD:
        raise RuntimeError("get_gloo_group: only train ranks have this group, after they have joined each other")
    return _gloo_group[1]


def destroy_process_group(group: ProcessGroup) -> None:
    """Leave a group made by `init_process_group`; its name can be used again. WORLD stays as it is."""
    import torch.distributed as dist

    with _creation_lock:
        dist.destroy_process_group(group)


def _create_group(backend, store, world_size: int, rank: int, group_name: str, timeout: timedelta) -> ProcessGroup:
    # The public constructors do not register a group with torch.distributed.broadcast, and prefix the store otherwise
    # than SGLang's side does, so the helper that torch itself uses for WORLD is called (empty list of global ranks).
    from torch.distributed import distributed_c10d as c10d

    group, _ = c10d._new_process_group_helper(
        world_size, rank, [], backend, store, group_name=group_name, timeout=timeout
    )
    c10d._world.pg_group_ranks[group] = {i: i for i in range(world_size)}
    return group


def wire_view(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor as backends can send it: 8-bit floats, which gloo does not know, go as bytes."""
    import torch

    return tensor.view(torch.uint8) if tensor.dtype.is_floating_point and tensor.element_size() == 1 else tensor
