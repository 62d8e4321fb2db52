"""Give the model's weights out under Hugging Face names, whole, whatever the parallel layout.

Invariants: every rank must walk the generator to its end (it takes part in collectives); all ranks see the same names
in the same order; tensors have the trainer's dtype and the shapes of the Hugging Face model, without vocabulary padding.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from slime.backends.megatron_utils.model_provider import unwrap
from slime.backends.megatron_utils.parameters import all_named_parameters, is_expert, shard_dim, tensor_group
from slime.backends.megatron_utils.weight_names import join_shards, rule_for, to_hf
from slime.utils import device
from slime.utils.checksum import tensor_checksum


@dataclass(frozen=True)
class Entry:
    """A parameter of the whole model and which ranks hold it: those of a pipeline stage and, for an expert, of an expert rank."""

    name: str
    stage: int
    expert_rank: int | None
    shape: tuple[int, ...]
    dtype: torch.dtype


def export_hf_weights(model: list[torch.nn.Module], args) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (Hugging Face name, tensor) of the whole model, on this process's device.

    Args:
        model: the chunks of this pipeline stage.
    Tensors may share memory with live parameters: copy what must outlive the next training step.
    """
    config = unwrap(model[0]).config
    for name, tensor in gather_parameters(dict(all_named_parameters(model)), lambda name: rule_for(name).kind):
        rule = rule_for(name)
        yield from zip(rule.hf_names, to_hf(rule.kind, tensor, config, args.vocab_size), strict=True)


def gather_parameters(
    local: dict[str, torch.Tensor], kind_of: Callable[[str], str]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, whole tensor) of the parameters that all ranks hold together; `kind_of` says how shards are joined."""
    for entry in _directory(local):
        with torch.no_grad():
            held = local.get(entry.name)
            tensor = None if held is None else _gather_tensor_ranks(held, kind_of(entry.name), entry.name)
            tensor = _from_stage(_from_expert_rank(tensor, entry), entry)
        yield entry.name, tensor


def export_checksums(model: list[torch.nn.Module], args) -> dict[str, str]:
    """Return the checksum of every exported tensor, as an engine that holds them reports it."""
    return {name: tensor_checksum(tensor) for name, tensor in export_hf_weights(model, args)}


def _whole_shape(name: str, parameter: torch.Tensor) -> tuple[int, ...]:
    shape, dim = list(parameter.shape), shard_dim(parameter)
    if dim is not None:
        shape[dim] *= tensor_group(name).size()
    return tuple(shape)


def _directory(local: dict[str, torch.Tensor]) -> list[Entry]:
    """Return every parameter of the model, in stage order; the experts of a layer by number."""
    from megatron.core import parallel_state as mpu

    stage, rank = mpu.get_pipeline_model_parallel_rank(), mpu.get_expert_model_parallel_rank()
    mine = [
        Entry(name, stage, rank if is_expert(name) else None, _whole_shape(name, tensor), tensor.dtype)
        for name, tensor in local.items()
    ]
    of_stage = [entry for part in _gathered(mine, mpu.get_expert_model_parallel_group()) for entry in part]
    entries: dict[str, Entry] = {}
    for part in _gathered(_by_layer(of_stage), mpu.get_pipeline_model_parallel_group()):
        for entry in part:
            entries.setdefault(entry.name, entry)
    return list(entries.values())


def _by_layer(entries: list[Entry]) -> list[Entry]:
    """Put the experts of other ranks beside those of the first, in the order of their numbers."""
    places: dict[str, int] = {}
    keys = {}
    for entry in entries:
        stem, number = re.fullmatch(r"(.*?)(\d*)", entry.name).groups()
        places.setdefault(stem, len(places))
        keys[entry.name] = (places[stem], int(number or 0))
    return sorted(entries, key=lambda entry: keys[entry.name])


def _gathered(value: object, group) -> list:
    """Return the value of every rank of the group, in rank order."""
    import torch.distributed as dist

    if group.size() == 1:
        return [value]
    values = [None] * group.size()
    dist.all_gather_object(values, value, group=group)
    return values


def _gather_tensor_ranks(parameter: torch.Tensor, kind: str, name: str) -> torch.Tensor:
    import torch.distributed as dist

    dim, group = shard_dim(parameter), tensor_group(name)
    if dim is None or group.size() == 1:
        return parameter.detach()
    shards = [torch.empty_like(parameter) for _ in range(group.size())]
    dist.all_gather(shards, parameter.detach().contiguous(), group=group)
    return join_shards(kind, shards, dim)


def _from_expert_rank(tensor: torch.Tensor | None, entry: Entry) -> torch.Tensor | None:
    """Give an expert's tensor to the other expert ranks of its stage; None on other stages."""
    from megatron.core import parallel_state as mpu

    if entry.expert_rank is None or mpu.get_pipeline_model_parallel_rank() != entry.stage:
        return tensor
    return _broadcast(tensor, entry, entry.expert_rank, mpu.get_expert_model_parallel_group())


def _from_stage(tensor: torch.Tensor | None, entry: Entry) -> torch.Tensor:
    from megatron.core import parallel_state as mpu

    return _broadcast(tensor, entry, entry.stage, mpu.get_pipeline_model_parallel_group())


def _broadcast(tensor: torch.Tensor | None, entry: Entry, owner: int, group) -> torch.Tensor:
    """Return the tensor of the group's rank `owner` on all its ranks."""
    import torch.distributed as dist

    if group.size() == 1:
        return tensor
    if group.rank() != owner:
        tensor = torch.empty(entry.shape, dtype=entry.dtype, device=device.device())
    tensor = tensor.contiguous()
    dist.broadcast(tensor, src=dist.get_global_rank(group, owner), group=group)
    return tensor
