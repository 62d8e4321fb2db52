"""Run megatron-core on a machine without CUDA (gloo and CPU tensors).

Call `install()` before the first import of megatron.core; with a GPU it does nothing.

An import hook confined to megatron.core modules, so torch itself stays as it is for everybody else:
1. string constants in their code objects are retargeted ("cuda" to "cpu", "torch.cuda.FloatTensor" to
   "torch.FloatTensor"), after the bytecode cache is read;
2. once a module has run, its global name `torch` becomes a view of torch whose `.cuda` has CPU versions of the few
   calls that megatron.core makes.
Then a few point fixes, each with its reason. The only global change is `Tensor.cuda`, which becomes the identity.

Invariant: every replaced name exists in the pinned version; `tests/unit/megatron/test_cpu_compat.py` fails otherwise.
"""

from __future__ import annotations

import contextlib
import importlib.abc
import importlib.machinery
import logging
import sys
import types
from collections.abc import Iterator

import torch

from slime.utils import device

_CONSTANTS = {"cuda": "cpu", **{f"torch.cuda.{t}Tensor": f"torch.{t}Tensor" for t in ("Float", "Half", "BFloat16")}}


def _retarget(constant):
    if isinstance(constant, str):
        return _CONSTANTS.get(constant, constant)
    if isinstance(constant, tuple):
        return tuple(_retarget(x) for x in constant)
    if isinstance(constant, types.CodeType):
        return constant.replace(co_consts=tuple(_retarget(x) for x in constant.co_consts))
    return constant


class _NullStream:
    """A stream or event where all work is synchronous: nothing to record, nothing to wait for."""

    def __init__(self, *args, **kwargs):
        pass

    def _ignore(self, *args, **kwargs):
        return self

    record_event = wait_event = wait_stream = record = wait = synchronize = _ignore


class _ModuleView(types.ModuleType):
    """A module seen through a few replaced attributes."""

    def __init__(self, base: types.ModuleType, **replaced):
        super().__init__(base.__name__)
        self.__dict__.update(replaced, _base=base)

    def __getattr__(self, name):
        return getattr(self._base, name)


def _torch_view() -> _ModuleView:
    stream = _NullStream()
    cuda = _ModuleView(
        torch.cuda,
        current_device=lambda: "cpu",
        synchronize=lambda device=None: None,
        get_rng_state=lambda device=None: torch.get_rng_state(),
        set_rng_state=lambda state, device=None: torch.set_rng_state(state),
        manual_seed=torch.default_generator.manual_seed,
        Stream=_NullStream,
        Event=_NullStream,
        current_stream=lambda device=None: stream,
        default_stream=lambda device=None: stream,
        stream=lambda s: contextlib.nullcontext(),
    )
    cuda.random = cuda
    return _ModuleView(torch, cuda=cuda)


class _Loader(importlib.machinery.SourceFileLoader):
    torch_view: types.ModuleType

    def get_code(self, fullname):
        return _retarget(super().get_code(fullname))

    def exec_module(self, module):
        super().exec_module(module)
        if module.__dict__.get("torch") is torch:
            module.torch = self.torch_view


class _Finder(importlib.abc.MetaPathFinder):
    def __init__(self):
        self.torch_view = _torch_view()

    def find_spec(self, fullname, path, target=None):
        if fullname != "megatron.core" and not fullname.startswith("megatron.core."):
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None and type(spec.loader) is importlib.machinery.SourceFileLoader:
            spec.loader = _Loader(spec.loader.name, spec.loader.path)
            spec.loader.torch_view = self.torch_view
        return spec


def install() -> None:
    """Make megatron.core importable and usable here. Safe to call again; does nothing beside a GPU."""
    if device.has_accelerator() or any(isinstance(f, _Finder) for f in sys.meta_path):
        return
    loaded = [m for m in sys.modules if m.startswith("megatron.core")]
    assert not loaded, f"cpu_compat.install() must run before megatron.core is imported; already there: {loaded[:3]}"
    sys.meta_path.insert(0, _Finder())
    torch.Tensor.cuda = lambda self, *args, **kwargs: self
    _apply_point_fixes()


def _apply_point_fixes() -> None:
    from megatron.core.tensor_parallel import mappings
    from megatron.core.tensor_parallel import random as mcore_random
    from megatron.core.transformer.moe import moe_utils, router, token_dispatcher

    mcore_random._set_cuda_rng_state = lambda state, device=-1, graph_safe=False: torch.set_rng_state(state)
    # Device and CPU share one generator here, so weights drawn in a forked state look like a leak to the check.
    logging.getLogger("megatron.core.tensor_parallel.random").setLevel(logging.ERROR)
    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None  # 0.16 leaves the name undefined without Transformer Engine
    router.TopKRouter._apply_expert_bias = _count_for_expert_bias  # compiled there, which needs a C++ compiler here
    mappings._gather_along_first_dim = _UnevenParts(mappings._gather_along_first_dim, _gather_uneven)
    mappings._reduce_scatter_along_first_dim = _UnevenParts(mappings._reduce_scatter_along_first_dim, _scatter_uneven)
    # All-to-all split sizes must be numpy also when the tensor already is on the CPU.
    token_dispatcher.maybe_move_tensor_to_cpu = lambda tensor, as_numpy=False, record_stream=False: (
        tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor
    )


def _count_for_expert_bias(router, routing_map: torch.Tensor, padding_mask=None) -> None:
    """Megatron's method without compilation: count each expert's tokens once per training forward."""
    if router.enable_expert_bias and torch.is_grad_enabled():
        with torch.no_grad():
            router.local_tokens_per_expert += routing_map.sum(dim=0)


class _UnevenParts:
    """A collective of Megatron's that takes parts of different sizes too, which gloo's own refuse."""

    def __init__(self, even, uneven):
        self._even, self._uneven = even, uneven

    def __call__(self, input_: torch.Tensor, group, split_sizes=None, use_global_buffer=False, **named) -> torch.Tensor:
        sizes = next(iter(named.values()), split_sizes)  # Megatron calls it output_split_sizes and input_split_sizes
        if group.size() == 1 or sizes is None:
            return self._even(input_, group, sizes, use_global_buffer)
        return self._uneven(input_, group, sizes)


def _gather_uneven(part: torch.Tensor, group, sizes: list[int]) -> torch.Tensor:
    """Return the parts of all ranks, of `sizes` rows each, below each other."""
    padded = part.new_zeros(max(sizes), *part.shape[1:])
    padded[: len(part)] = part
    parts = [torch.empty_like(padded) for _ in sizes]
    torch.distributed.all_gather(parts, padded, group=group)
    return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])


def _scatter_uneven(whole: torch.Tensor, group, sizes: list[int]) -> torch.Tensor:
    """Return this rank's part of the sum over ranks."""
    total = whole.clone()
    torch.distributed.all_reduce(total, group=group)
    return total.split(sizes)[group.rank()].contiguous()


@contextlib.contextmanager
def lone_groups_shared() -> Iterator[None]:
    """While Megatron builds its groups: those whose only member is the same rank are one group, WORLD where it is the only rank.
    Nothing changes beside a GPU.

    There are a score of them for a model that is not split, and each gloo group has a thread that wakes a hundred times a
    second. Nobody else is in them, so nothing can get out of order.
    """
    from megatron.core import parallel_state

    make, made = parallel_state.create_group, {}

    def create_group(ranks=None, *args, **kwargs):
        if ranks is None or len(ranks) != 1:
            return make(ranks, *args, **kwargs)
        if tuple(ranks) not in made:
            is_world = torch.distributed.get_world_size() == 1
            made[tuple(ranks)] = torch.distributed.group.WORLD if is_world else make(ranks, *args, **kwargs)
        return made[tuple(ranks)]

    if not device.has_accelerator():
        parallel_state.create_group = create_group
    try:
        yield
    finally:
        parallel_state.create_group = make
