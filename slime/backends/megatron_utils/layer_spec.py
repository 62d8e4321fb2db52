"""Which modules a transformer layer is made of: Transformer Engine's on a GPU that has it, else ours on torch.

Both give the same parameters under the same checkpoint names. Does not know arguments beyond the config.
"""

from __future__ import annotations

from slime.utils import device


def uses_transformer_engine() -> bool:
    """Return whether layers come from Transformer Engine on this machine."""
    if not device.has_accelerator():
        return False
    from megatron.core.extensions import transformer_engine

    return transformer_engine.HAVE_TE


def decoder_spec(config):
    """Return the spec of the decoder block for this pipeline stage."""
    if uses_transformer_engine():
        from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec

        return get_gpt_decoder_block_spec(config, use_transformer_engine=True)
    return _local_spec(config)


def _local_spec(config):
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build

    from slime.backends.megatron_utils import packed_rope
    from slime.backends.megatron_utils.local_layers import RMSNorm, SDPACoreAttention

    if config.normalization != "RMSNorm":
        raise ValueError(f"--normalization {config.normalization} needs Transformer Engine; RMSNorm works everywhere")
    packed_rope.install()
    layer = get_gpt_layer_local_spec(qk_layernorm=config.qk_layernorm, normalization="RMSNorm")
    parts = layer.submodules
    parts.input_layernorm = parts.pre_mlp_layernorm = RMSNorm
    attention = parts.self_attention.submodules
    attention.core_attention = SDPACoreAttention
    if config.qk_layernorm:
        attention.q_layernorm = attention.k_layernorm = RMSNorm
    return TransformerBlockSubmodules(layer_specs=[layer] * get_num_layers_to_build(config), layer_norm=RMSNorm)
