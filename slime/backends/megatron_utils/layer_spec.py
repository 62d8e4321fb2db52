"""Which modules a transformer layer is made of: Transformer Engine's on a GPU that has it, else ours on torch.

Both give the same parameters under the same checkpoint names. Does not know arguments beyond the config.
"""

from __future__ import annotations

from slime.batching.flops import moe_layers
from slime.utils import device


def uses_transformer_engine() -> bool:
    """Return whether layers come from Transformer Engine on this machine."""
    if not device.has_accelerator():
        return False
    from megatron.core.extensions import transformer_engine

    return transformer_engine.HAVE_TE


def decoder_spec(config, vp_stage: int | None = None, with_adapters: bool = False):
    """Return the spec of the decoder block for this (virtual) pipeline stage.

    Low-rank adapters stand on our own layers: Transformer Engine's hide the norm's output, which adapters read.
    """
    if uses_transformer_engine() and not with_adapters:
        from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec

        return get_gpt_decoder_block_spec(config, use_transformer_engine=True, vp_stage=vp_stage)
    return _local_spec(config, vp_stage)


def _local_spec(config, vp_stage: int | None):
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
    from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

    from slime.backends.megatron_utils import packed_rope, shortcuts
    from slime.backends.megatron_utils.local_layers import RMSNorm

    if config.normalization != "RMSNorm":
        raise ValueError(f"--normalization {config.normalization} needs Transformer Engine; RMSNorm works everywhere")
    packed_rope.install()
    shortcuts.plain_linears()
    kinds = {has_experts: _local_layer(config, has_experts) for has_experts in set(layers_with_experts(config))}
    first = get_transformer_layer_offset(config, vp_stage=vp_stage)
    here = layers_with_experts(config)[first : first + get_num_layers_to_build(config, vp_stage=vp_stage)]
    return TransformerBlockSubmodules(layer_specs=[kinds[has_experts] for has_experts in here], layer_norm=RMSNorm)


def layers_with_experts(config) -> list[bool]:
    """Return for every layer of the model whether its MLP is a mixture of experts."""
    if config.num_moe_experts is None:
        return [False] * config.num_layers
    return moe_layers(config.moe_layer_freq, config.num_layers)


def _local_layer(config, has_experts: bool):
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    from slime.backends.megatron_utils.local_layers import RMSNorm, SDPACoreAttention, swiglu

    layer = get_gpt_layer_local_spec(
        num_experts=config.num_moe_experts if has_experts else None,
        qk_layernorm=config.qk_layernorm,
        normalization="RMSNorm",
    )
    parts = layer.submodules
    parts.input_layernorm = parts.pre_mlp_layernorm = RMSNorm
    if config.use_te_activation_func:  # Megatron's name for an activation that takes gate and up together
        parts.mlp.submodules.activation_func = swiglu
    attention = parts.self_attention.submodules
    attention.core_attention = SDPACoreAttention
    if config.qk_layernorm:
        attention.q_layernorm = attention.k_layernorm = RMSNorm
    return layer
