"""Give the model's weights out under Hugging Face names, whole, whatever the parallel layout.

Invariants: every rank must walk the generator to its end (it takes part in collectives); all ranks see the same names
in the same order; tensors have the trainer's dtype and the shapes of the Hugging Face model, without vocabulary padding.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from slime.backends.megatron_utils.model_provider import unwrap
from slime.backends.megatron_utils.parameters import named_parameters, shard_dim
from slime.backends.megatron_utils.weight_names import join_shards, rule_for, to_hf
from slime.utils import device
from slime.utils.checksum import tensor_checksum


def export_hf_weights(model: torch.nn.Module, args) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (Hugging Face name, tensor) of the whole model, on this process's device.

    Tensors may share memory with live parameters: copy what must outlive the next training step.
    """
    config = unwrap(model).config
    local = dict(named_parameters(model))
    for name, owner, shape, dtype in _directory(local):
        rule = rule_for(name)
        with torch.no_grad():
            tensor = _gather_tensor_ranks(local[name], rule.kind) if name in local else None
            tensor = _from_stage(tensor, owner, shape, dtype)
            yield from zip(rule.hf_names, to_hf(rule.kind, tensor, config, args.vocab_size), strict=True)


def export_checksums(model: torch.nn.Module, args) -> dict[str, str]:
    """Return the checksum of every exported tensor, as an engine that holds them reports it."""
    return {name: tensor_checksum(tensor) for name, tensor in export_hf_weights(model, args)}


def _whole_shape(parameter: torch.nn.Parameter) -> tuple[int, ...]:
    from megatron.core import parallel_state as mpu

    shape, dim = list(parameter.shape), shard_dim(parameter)
    if dim is not None:
        shape[dim] *= mpu.get_tensor_model_parallel_world_size()
    return tuple(shape)


def _directory(local: dict[str, torch.nn.Parameter]) -> list[tuple]:
    """Return (name, owning stage, shape, dtype) of every parameter of the model, in stage order."""
    import torch.distributed as dist
    from megatron.core import parallel_state as mpu

    mine = [(name, _whole_shape(p), p.dtype) for name, p in local.items()]
    stages = [mine]
    if mpu.get_pipeline_model_parallel_world_size() > 1:
        stages = [None] * mpu.get_pipeline_model_parallel_world_size()
        dist.all_gather_object(stages, mine, group=mpu.get_pipeline_model_parallel_group())
    entries, seen = [], set()
    for stage, names in enumerate(stages):
        for name, shape, dtype in names:
            if name not in seen:
                seen.add(name)
                entries.append((name, stage, shape, dtype))
    return entries


def _gather_tensor_ranks(parameter: torch.nn.Parameter, kind: str) -> torch.Tensor:
    import torch.distributed as dist
    from megatron.core import parallel_state as mpu

    dim, size = shard_dim(parameter), mpu.get_tensor_model_parallel_world_size()
    if dim is None or size == 1:
        return parameter.detach()
    shards = [torch.empty_like(parameter) for _ in range(size)]
    dist.all_gather(shards, parameter.detach().contiguous(), group=mpu.get_tensor_model_parallel_group())
    return join_shards(kind, shards, dim)


def _from_stage(tensor: torch.Tensor | None, owner: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    import torch.distributed as dist
    from megatron.core import parallel_state as mpu

    if mpu.get_pipeline_model_parallel_world_size() == 1:
        return tensor
    if mpu.get_pipeline_model_parallel_rank() != owner:
        tensor = torch.empty(shape, dtype=dtype, device=device.device())
    group = mpu.get_pipeline_model_parallel_group()
    dist.broadcast(tensor.contiguous(), src=dist.get_global_rank(group, owner), group=group)
    return tensor
