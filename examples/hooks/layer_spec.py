"""The layers of the trainer's model, changed.  --spec examples/hooks/layer_spec.py:gentle_attention

Megatron's spec functions give its layers; without Transformer Engine they give ours, which have the same parameters. Engines have the
model's own layers, so a change of what comes out shows in the gap of log-probs.
"""

from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec
from megatron.core.transformer.attention import SelfAttention


class GentleAttention(SelfAttention):
    """Attention that lets half of the gradient through."""

    def forward(self, *args, **kwargs):
        output, bias = super().forward(*args, **kwargs)
        return output / 2 + output.detach() / 2, bias


def gentle_attention(args, config, vp_stage):
    """One layer's spec stands for all of them; a spec of the whole block may differ from layer to layer."""
    layer = get_gpt_layer_with_transformer_engine_spec(
        num_experts=args.num_experts, qk_layernorm=args.qk_layernorm, moe_grouped_gemm=args.moe_grouped_gemm
    )
    layer.submodules.self_attention.module = GentleAttention
    return layer
