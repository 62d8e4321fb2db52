"""The parameters of this rank under names that hold for the whole model.

A layer's and an expert's number is global (pipeline and expert offsets added) and wrappers' prefixes are gone, so the same
parameter has the same name on every layout, whichever module runs the experts. The balancing bias of a router, a buffer for
Megatron, counts as a parameter. Does not know Hugging Face names.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import torch

from slime.backends.megatron_utils.model_provider import unwrap

_LAYER = re.compile(r"^decoder\.layers\.(\d+)\.")
# Experts run one after the other, each a module, or together by grouped products.
_EXPERT = re.compile(r"\.mlp\.experts\.(?:local_experts\.(\d+)\.(linear_fc[12])\.weight|(linear_fc[12])\.weight(\d+))$")
_EXPERT_BIAS = "router.expert_bias"


def all_named_parameters(chunks: list[torch.nn.Module]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (global name, parameter) of every chunk that this pipeline stage holds."""
    for chunk in chunks:
        yield from named_parameters(chunk)


def named_parameters(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (global name, parameter) of the model itself: low-rank adapters on it (`lora`) are left out.

    The last stage's copy of a tied embedding goes by the embedding's name.
    """
    bare = unwrap(model)
    offset = _layer_offset(bare)
    first_expert = _first_expert(bare.config)
    buffers = ((name, buffer) for name, buffer in bare.named_buffers() if name.endswith(_EXPERT_BIAS))
    for name, parameter in (*bare.named_parameters(), *buffers):
        if name.startswith("adapters."):
            continue
        if name == "output_layer.weight" and bare.share_embeddings_and_output_weights:
            name = "embedding.word_embeddings.weight"
        name = _LAYER.sub(lambda m: f"decoder.layers.{int(m[1]) + offset}.", name)
        yield (
            _EXPERT.sub(lambda m: f".mlp.experts.{m[2] or m[3]}.weight{int(m[1] or m[4]) + first_expert}", name),
            parameter,
        )


def _layer_offset(bare) -> int:
    from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

    return get_transformer_layer_offset(bare.config, vp_stage=getattr(bare, "vp_stage", None))


def _first_expert(config) -> int:
    """Return the number of the first expert that this rank holds."""
    from megatron.core import parallel_state as mpu

    if config.num_moe_experts is None:
        return 0
    return config.num_moe_experts // mpu.get_expert_model_parallel_world_size() * mpu.get_expert_model_parallel_rank()


def is_expert(name: str) -> bool:
    """Return whether a (global) name is that of a routed expert's parameter, of which each expert rank holds its own."""
    return ".mlp.experts." in name


def shard_dim(parameter: torch.Tensor) -> int | None:
    """Return the dimension that tensor parallelism cuts, None for a parameter that every rank holds whole."""
    is_cut = getattr(parameter, "tensor_model_parallel", False)
    return parameter.partition_dim if is_cut else None


def tensor_group(name: str):
    """Return the process group over which the parameter is cut: experts have tensor parallelism of their own."""
    from megatron.core import parallel_state as mpu

    return mpu.get_expert_tensor_parallel_group() if is_expert(name) else mpu.get_tensor_model_parallel_group()
