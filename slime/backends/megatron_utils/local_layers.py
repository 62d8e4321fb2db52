"""What megatron-core lacks without Transformer Engine: RMSNorm, attention over packed sequences, a lean SwiGLU.

Both follow the constructor signatures that Megatron's layer specs call. Attention is causal, with grouped queries, on
torch's scaled dot product; it takes packed streams (THD), also zigzag parts of them, and plain [S, B, H, D].
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from megatron.core.transformer.module import MegatronModule

from slime.backends.megatron_utils.packed_sequences import gather_rows, scatter_rows


class RMSNorm(torch.nn.Module):
    """Root-mean-square norm computed in float32; unlike Megatron's torch norm it allows sequence parallelism."""

    def __init__(self, config, hidden_size: int, eps: float = 1e-5, **_):
        super().__init__()
        if config.normalization != "RMSNorm":
            raise ValueError(
                f"--normalization {config.normalization} needs Transformer Engine; RMSNorm works everywhere"
            )
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel  # its gradient is then summed over tensor ranks
        self.zero_centered = config.layernorm_zero_centered_gamma
        if self.zero_centered:
            torch.nn.init.zeros_(self.weight)
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = self.weight + 1 if self.zero_centered else self.weight
        if x.dtype == torch.float32:
            return F.rms_norm(x, (x.size(-1),), scale, self.eps)
        return scale * F.rms_norm(x.float(), (x.size(-1),), None, self.eps).to(x.dtype)


def swiglu(gate_up: torch.Tensor) -> torch.Tensor:
    """Return silu(gate) * up of [..., gate, up]; the `activation_func` of an MLP spec."""
    return _SwiGLU.apply(gate_up)


class _SwiGLU(torch.autograd.Function):
    """Keeps its input alone and writes both halves of the gradient in place."""

    @staticmethod
    def forward(ctx, gate_up):
        ctx.save_for_backward(gate_up)
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate).mul_(up)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        (gate_up,) = ctx.saved_tensors
        gate, up = gate_up.chunk(2, dim=-1)
        whole = torch.empty_like(gate_up)
        grad_gate, grad_up = whole.chunk(2, dim=-1)
        torch.ops.aten.silu_backward.grad_input(grad * up, gate, grad_input=grad_gate)
        torch.mul(grad, F.silu(gate), out=grad_up)
        return whole


class SDPACoreAttention(MegatronModule):
    """`core_attention` of a layer spec, on torch's scaled dot product attention."""

    def __init__(
        self,
        config,
        layer_number,
        attn_mask_type,
        attention_type,
        attention_dropout=None,
        softmax_scale=None,
        k_channels=None,
        v_channels=None,
        cp_comm_type=None,
        pg_collection=None,
    ):
        super().__init__(config=config)
        self.scale = softmax_scale if softmax_scale is not None else 1 / math.sqrt(k_channels or config.kv_channels)
        self.dropout = config.attention_dropout if attention_dropout is None else attention_dropout

    def forward(
        self,
        query,
        key,
        value,
        attention_mask=None,
        attn_mask_type=None,
        attention_bias=None,
        packed_seq_params=None,
    ) -> torch.Tensor:
        """Attend within each sequence.

        Args:
            query, key, value: [T, H, D] with `packed_seq_params` (a PackedBatchParams), else [S, B, H, D].
        Returns: [T, H * D], or [S, B, H * D].
        """
        if packed_seq_params is None:
            out = self._causal(*(x.transpose(0, 1) for x in (query, key, value)))
            return out.transpose(0, 1).flatten(2)
        if packed_seq_params.part is not None:
            return self._over_context(query, key, value, packed_seq_params)
        buckets = packed_seq_params.buckets
        columns = (gather_rows(x, buckets) for x in (query, key, value))
        rows = [self._causal(*bucket) for bucket in zip(*columns, strict=True)]
        return scatter_rows(rows, buckets, query.size(0)).flatten(1)

    def _over_context(self, query, key, value, packed) -> torch.Tensor:
        """Queries of this rank's parts of the sequences, keys and values of all context ranks; [T, H, D] to [T, H * D]."""
        from megatron.core import parallel_state as mpu
        from megatron.core.tensor_parallel import gather_from_sequence_parallel_region

        width = key.size(-1)
        both = torch.cat((key, value), dim=-1)
        both = gather_from_sequence_parallel_region(both, group=mpu.get_context_parallel_group())  # [cp * T, H, 2 * D]
        rows = []
        for q, keys in zip(gather_rows(query, packed.buckets), packed.context_keys, strict=True):
            seen = both.index_select(0, keys.rows).view(q.size(0), keys.length, *both.shape[1:])
            rows.append(self._attend(q, seen[..., :width], seen[..., width:], keys.mask))
        return scatter_rows(rows, packed.buckets, query.size(0)).flatten(1)

    def _causal(self, query, key, value) -> torch.Tensor:
        """[B, L, H, D] to the same; query i sees keys up to i."""
        return self._attend(query, key, value, None)

    def _attend(self, query, key, value, mask: torch.Tensor | None) -> torch.Tensor:
        out = F.scaled_dot_product_attention(
            query.transpose(1, 2),
            key.transpose(1, 2),
            value.transpose(1, 2),
            attn_mask=mask,
            is_causal=mask is None,
            scale=self.scale,
            dropout_p=self.dropout if self.training else 0.0,
            enable_gqa=query.size(2) != key.size(2),
        )
        return out.transpose(1, 2)
