"""Adapters whole and by name: out for engines and folders, in from folders, sharded for checkpoints, merged for exports.

Invariants: names are PEFT's; every rank must take part in what gathers, and all get the same tensors; a merged tensor is
computed in float32 and rounded once to the model's dtype.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

import torch

from slime.backends.megatron_utils import megatron_to_hf as export
from slime.backends.megatron_utils.lora.layers import PREFIX, Adapters, adapters_of, parameter_key
from slime.backends.megatron_utils.parameters import named_parameters, shard_dim
from slime.backends.megatron_utils.weight_names import tensor_shard
from slime.utils import peft_format

_FINGERPRINT_TOLERANCE = 1e-5


def whole_adapter(model: list, adapter: str) -> dict[str, torch.Tensor]:
    """Return the tensors of one adapter of the whole model by PEFT name, on this process's device."""
    local = {}
    for chunk in model:
        for module, factor, parameter in adapters_of(chunk).factors(adapter):
            local[peft_format.tensor_name(module, factor)] = parameter
    with torch.no_grad():
        return dict(export.gather_parameters(local, kind_of=lambda name: "copy"))


def config_of(args) -> dict:
    """Return the adapter_config.json of the run's adapters."""
    return peft_format.adapter_config(
        args.hf_checkpoint, args.lora_rank, args.lora_alpha, args.lora_dropout, args.target_modules
    )


def write_folders(model: list, args, directory: str | Path) -> None:
    """Write every adapter as `directory`/<name>, a folder that PEFT loads; all ranks call it, rank 0 writes."""
    import torch.distributed as dist

    for adapter in args.lora_adapters:
        tensors = whole_adapter(model, adapter)
        if dist.get_rank() == 0:
            peft_format.write_adapter(Path(directory) / adapter, config_of(args), tensors)


def load_folder(model: list, args, adapter: str, folder: str) -> None:
    """Fill one adapter from a PEFT folder.

    Raises: ValueError when the folder's modules are not those of the flags, which its rank and scaling are known to fit.
    """
    _, tensors = peft_format.read_adapter(folder)
    where = f"--lora-adapter-path {folder}"
    unused = set(tensors)
    for chunk in model:
        for module, factor, parameter in adapters_of(chunk).factors(adapter):
            name = peft_format.tensor_name(module, factor)
            if name not in tensors:
                raise ValueError(f"{where}: no {name} there; --target-modules has to be what the folder was made with")
            _fill(parameter, tensors[name], f"{where}: {name}")
            unused.discard(name)
    targets = {f".{target}.lora_" for target in args.target_modules}
    strange = sorted(name for name in unused if not any(target in name for target in targets))
    if strange:
        raise ValueError(f"{where}: {strange[0]} is outside --target-modules {' '.join(args.target_modules)}")


@torch.no_grad()
def _fill(parameter: torch.nn.Parameter, whole: torch.Tensor, what: str) -> None:
    from megatron.core import parallel_state as mpu

    dim, size = shard_dim(parameter), mpu.get_tensor_model_parallel_world_size()
    if dim is not None and parameter.allreduce and size > 1:
        whole = tensor_shard("copy", whole, dim, mpu.get_tensor_model_parallel_rank(), size)
    if whole.shape != parameter.shape:
        raise ValueError(
            f"{what} has shape {list(whole.shape)}, this rank's part of the model takes {list(parameter.shape)}"
        )
    parameter.copy_(whole)


# ---- merging ----------------------------------------------------------------------------------------------------------


def merged(
    base: Iterable[tuple[str, torch.Tensor]], adapter: dict[str, torch.Tensor], scaling: float
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the exported tensors of the base with `scaling * B @ A` added where the adapter has factors."""
    factors = peft_format.factors_by_module(adapter)
    for name, tensor in base:
        pair = factors.get(name.removesuffix(".weight")) if name.endswith(".weight") else None
        if pair is None:
            yield name, tensor
            continue
        a, b = (factor.float() for factor in pair)
        yield name, torch.addmm(tensor.float(), b, a, alpha=scaling).to(tensor.dtype)


# ---- checkpoints ------------------------------------------------------------------------------------------------------


def sharded_state(adapters: Adapters) -> dict:
    """Return the adapters' part of a torch_dist checkpoint."""
    from megatron.core import parallel_state as mpu
    from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint

    state = {}
    for adapter in adapters.settings.names:
        for module, factor, parameter in adapters.factors(adapter):
            key = parameter_key(adapter, module, factor)
            group = mpu.get_data_parallel_group(with_context_parallel=True)
            if not parameter.allreduce:
                group = mpu.get_expert_data_parallel_group()
            dim = shard_dim(parameter) if parameter.allreduce else None
            state |= make_sharded_tensors_for_checkpoint(
                {key: parameter},
                PREFIX,
                {} if dim is None else {key: dim},
                tp_group=mpu.get_tensor_model_parallel_group() if parameter.allreduce else _alone(),
                dp_cp_group=group,
            )
    return state


def _alone():
    from megatron.core import parallel_state as mpu

    return mpu.get_expert_tensor_parallel_group()


def without_adapters(state: dict) -> dict:
    """Return a model's sharded state without its adapters."""
    return {name: value for name, value in state.items() if not name.startswith(PREFIX)}


def facts(args, model: list) -> dict:
    """Return what a checkpoint of adapters says about itself: their shape, and the base that it does not hold."""
    return {
        "adapters": list(args.lora_adapters),
        "rank": args.lora_rank,
        "alpha": float(args.lora_alpha),
        "targets": sorted(args.target_modules),
        "base": args.lora_base,
        "base_precision": args.precision,
        "base_fingerprint": base_fingerprint(model),
    }


def check_facts(saved: dict | None, args, model: list, directory: str) -> None:
    """Refuse to continue from a checkpoint of other adapters or of another base.

    Raises: ValueError naming the difference.
    """
    if saved is None:
        raise ValueError(f"--lora-rank {args.lora_rank}: checkpoint {directory} was trained without adapters")
    now = facts(args, model)
    for key, flag in (
        ("adapters", "--lora-adapters"),
        ("rank", "--lora-rank"),
        ("alpha", "--lora-alpha"),
        ("targets", "--target-modules"),
    ):
        if saved[key] != now[key]:
            raise ValueError(f"{flag} is {now[key]}, checkpoint {directory} was trained with {saved[key]}")
    gap = abs(saved["base_fingerprint"] - now["base_fingerprint"])
    if saved["base_precision"] == now["base_precision"] and gap > _FINGERPRINT_TOLERANCE * saved["base_fingerprint"]:
        raise ValueError(
            f"checkpoint {directory} holds adapters of the base model {saved['base']}; the weights of {now['base']} are "
            "others"
        )


@torch.no_grad()
def base_fingerprint(model: list) -> float:
    """Return the sum of absolute weights of the base, experts left out; the same on every layout up to rounding."""
    import torch.distributed as dist
    from megatron.core import parallel_state as mpu

    total = torch.zeros(1, dtype=torch.float64)
    for chunk in model:
        for name, parameter in named_parameters(chunk):
            is_copy = shard_dim(parameter) is None and mpu.get_tensor_model_parallel_rank() != 0
            is_tied_copy = getattr(parameter, "shared_embedding", False) and not mpu.is_pipeline_first_stage()
            if is_copy or is_tied_copy or ".experts." in name:
                continue
            total += parameter.abs().sum(dtype=torch.float64).cpu()
    total = total.to(parameter.device)
    if mpu.get_model_parallel_group().size() > 1:
        dist.all_reduce(total, group=mpu.get_model_parallel_group())
    return float(total)
