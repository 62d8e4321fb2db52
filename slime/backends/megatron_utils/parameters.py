"""The parameters of this rank under names that hold for the whole model.

A layer's number is global (pipeline offset added) and wrappers' prefixes are gone, so the same parameter has the same
name on every layout. Does not know Hugging Face names.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import torch

from slime.backends.megatron_utils.model_provider import unwrap

_LAYER = re.compile(r"^decoder\.layers\.(\d+)\.")


def named_parameters(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """Yield (global name, parameter). The last stage's copy of a tied embedding goes by the embedding's name."""
    bare = unwrap(model)
    offset = _layer_offset(bare)
    for name, parameter in bare.named_parameters():
        if name == "output_layer.weight" and bare.share_embeddings_and_output_weights:
            name = "embedding.word_embeddings.weight"
        yield _LAYER.sub(lambda m: f"decoder.layers.{int(m[1]) + offset}.", name), parameter


def _layer_offset(bare) -> int:
    from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

    return get_transformer_layer_offset(bare.config)


def shard_dim(parameter: torch.nn.Parameter) -> int | None:
    """Return the dimension that tensor parallelism cuts, None for a parameter that every rank holds whole."""
    is_cut = getattr(parameter, "tensor_model_parallel", False)
    return parameter.partition_dim if is_cut else None
