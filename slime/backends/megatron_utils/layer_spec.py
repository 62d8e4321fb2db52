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

    from slime.backends.megatron_utils.local_layers import RMSNorm

    experts = {False: None, True: config.num_moe_experts}
    kinds = {
        has_experts: local_layer(experts[has_experts], qk_layernorm=config.qk_layernorm)
        for has_experts in set(layers_with_experts(config))
    }
    first = get_transformer_layer_offset(config, vp_stage=vp_stage)
    here = layers_with_experts(config)[first : first + get_num_layers_to_build(config, vp_stage=vp_stage)]
    return TransformerBlockSubmodules(layer_specs=[kinds[has_experts] for has_experts in here], layer_norm=RMSNorm)


def layers_with_experts(config) -> list[bool]:
    """Return for every layer of the model whether its MLP is a mixture of experts."""
    if config.num_moe_experts is None:
        return [False] * config.num_layers
    return moe_layers(config.moe_layer_freq, config.num_layers)


def local_layer(
    num_experts: int | None = None,
    moe_grouped_gemm: bool = False,
    qk_layernorm: bool = False,
    multi_latent_attention: bool = False,
    fp8: str | None = None,
    moe_use_legacy_grouped_gemm: bool = False,
    *,
    normalization: str | None = None,
    qk_l2_norm: bool = False,
    **kernels,
):
    """Return the spec of a layer that needs no Transformer Engine; the arguments are those of Megatron's spec functions.

    Those that choose between kernels of the same result have no effect.

    Raises: ValueError for layers that are not built yet. TypeError for an argument that Megatron's do not have.
    """
    from megatron.core.models.gpt import gpt_layer_specs

    from slime.backends.megatron_utils import packed_rope, shortcuts
    from slime.backends.megatron_utils.local_layers import RMSNorm, SDPACoreAttention, swiglu

    if multi_latent_attention:
        raise ValueError("--multi-latent-attention: layers with it are not built yet")
    if unknown := kernels.keys() - _KERNELS:
        raise TypeError(f"megatron-core has no layer spec with {', '.join(sorted(unknown))}")
    packed_rope.install()
    shortcuts.plain_linears()
    megatrons = getattr(gpt_layer_specs, _KEPT, gpt_layer_specs.get_gpt_layer_local_spec)
    layer = megatrons(
        num_experts=num_experts, qk_layernorm=qk_layernorm, normalization="RMSNorm", qk_l2_norm=qk_l2_norm
    )
    parts = layer.submodules
    parts.input_layernorm = parts.pre_mlp_layernorm = RMSNorm
    if num_experts is None:  # read where gate and up come together (`model_config`)
        parts.mlp.submodules.activation_func = swiglu
    attention = parts.self_attention.submodules
    attention.core_attention = SDPACoreAttention
    if qk_layernorm and not qk_l2_norm:
        attention.q_layernorm = attention.k_layernorm = RMSNorm
    return layer


_KERNELS = {
    "use_te_op_fuser", "use_te_activation_func", "use_kitchen", "use_kitchen_attention", "kitchen_attention_backend",
}  # fmt: skip
_KEPT = "_get_gpt_layer_local_spec"
"""Megatron's own function, after `offer_local_layers`."""


def offer_local_layers() -> None:
    """Have Megatron's spec functions give layers that work here, where Transformer Engine is not: plugins call them. Twice is once."""
    from megatron.core.models.gpt import gpt_layer_specs
    from megatron.core.transformer import transformer_block

    from slime.backends.megatron_utils.local_layers import RMSNorm

    if uses_transformer_engine() or hasattr(gpt_layer_specs, _KEPT):
        return
    setattr(gpt_layer_specs, _KEPT, gpt_layer_specs.get_gpt_layer_local_spec)
    gpt_layer_specs.get_gpt_layer_local_spec = local_layer
    gpt_layer_specs.get_gpt_layer_with_transformer_engine_spec = local_layer
    gpt_layer_specs.TENorm = gpt_layer_specs.LNImpl = transformer_block.LayerNormImpl = RMSNorm
