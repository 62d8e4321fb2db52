"""Estimate the forward FLOPs of one sample, for load balance and TFLOPs metrics.

Counts multiply-adds as 2. Per layer: attention projections, causal attention (half of L^2), output projection and the
three matrices of a gated MLP; then the language model head. MoE layers use `moe_ffn_hidden_size * topk + shared`.
Training costs about three times the forward pass.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ModelShape:
    """Sizes that matter for FLOPs.

    projection_params: parameters of the attention projections (q, k, v, output) of one layer.
    attention_width: num_heads * (query-key width + value width) / 2.
    mlp_width_total: gated MLP width summed over layers.
    """

    num_layers: int
    hidden_size: int
    projection_params: int
    attention_width: float
    mlp_width_total: int
    vocab_size: int

    @classmethod
    def from_args(cls, args) -> ModelShape:
        """Read the sizes from Megatron's argument names."""
        hidden, heads = args.hidden_size, args.num_attention_heads
        if args.multi_latent_attention:
            projection, width = _mla_sizes(args, hidden, heads)
        else:
            head_dim = args.kv_channels or hidden // heads
            groups = args.num_query_groups if args.group_query_attention else heads
            projection = hidden * head_dim * (2 * heads + 2 * groups)
            width = heads * head_dim
        return cls(
            num_layers=args.num_layers,
            hidden_size=hidden,
            projection_params=projection,
            attention_width=width,
            mlp_width_total=_mlp_width_total(args),
            vocab_size=args.padded_vocab_size or args.vocab_size,
        )


def sample_flops(length: int, shape: ModelShape) -> float:
    """Return the forward FLOPs of one sample of `length` tokens."""
    projections = 2 * length * shape.num_layers * shape.projection_params
    attention = 2 * length * length * shape.num_layers * shape.attention_width
    mlp = 2 * length * 3 * shape.hidden_size * shape.mlp_width_total
    head = 2 * length * shape.hidden_size * shape.vocab_size
    return float(projections + attention + mlp + head)


def _mla_sizes(args, hidden: int, heads: int) -> tuple[int, float]:
    """Return (projection parameters per layer, attention width) of multi-latent attention."""
    qk_dim = args.qk_head_dim + args.qk_pos_emb_head_dim
    if args.q_lora_rank:
        query = hidden * args.q_lora_rank + args.q_lora_rank * heads * qk_dim
    else:
        query = hidden * heads * qk_dim
    key_value = hidden * (args.kv_lora_rank + args.qk_pos_emb_head_dim)
    key_value += args.kv_lora_rank * heads * (args.qk_head_dim + args.v_head_dim)
    output = heads * args.v_head_dim * hidden
    return query + key_value + output, heads * (qk_dim + args.v_head_dim) / 2


def _mlp_width_total(args) -> int:
    """Return the gated MLP width summed over layers."""
    dense = args.ffn_hidden_size
    if not args.num_experts:
        return dense * args.num_layers
    moe = args.moe_ffn_hidden_size * args.moe_router_topk + (args.moe_shared_expert_intermediate_size or 0)
    return sum(moe if is_moe else dense for is_moe in moe_layers(args.moe_layer_freq, args.num_layers))


def moe_layers(moe_layer_freq: int | list[int], num_layers: int) -> list[bool]:
    """Expand `--moe-layer-freq` (every n-th layer, or one flag per layer) to one bool per layer."""
    if isinstance(moe_layer_freq, int):
        return [layer % moe_layer_freq == 0 for layer in range(num_layers)]
    return [bool(flag) for flag in moe_layer_freq]
