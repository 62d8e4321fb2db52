"""Rotary embedding of a whole packed stream at once.

Megatron's unfused version slices the stream in Python, once per sequence, for queries and keys of every layer. This
one gathers the angles by position and keeps sine and cosine for the layers that follow. Same arithmetic, same result.
Used where Transformer Engine's fused kernel is not.
"""

from __future__ import annotations

import torch


class _Rotate(torch.autograd.Function):
    """x * cos + (-second half, first half) * sin in three passes, and back: the transposed rotation of the gradient."""

    @staticmethod
    def forward(ctx, x, cos, sin):
        ctx.save_for_backward(cos, sin)
        half = x.size(-1) // 2
        out = x * cos
        out[..., :half].addcmul_(x[..., half:], sin[..., :half], value=-1)
        out[..., half:].addcmul_(x[..., :half], sin[..., half:])
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        cos, sin = ctx.saved_tensors
        half = grad.size(-1) // 2
        out = grad * cos
        out[..., :half].addcmul_(grad[..., half:], sin[..., half:])
        out[..., half:].addcmul_(grad[..., :half], sin[..., :half], value=-1)
        return out, None, None


class PackedRope:
    """Callable with the signature of Megatron's `_apply_rotary_pos_emb_thd`; remembers the last micro-batch."""

    def __init__(self, apply_dense, apply_sliced):
        self.apply_dense, self.apply_sliced = apply_dense, apply_sliced
        self.key, self.packed_freqs = None, None

    def __call__(
        self, t, cu_seqlens, freqs, rotary_interleaved=False, multi_latent_attention=False, mscale=1.0, cp_group=None
    ):
        has_parts = cp_group.size() > 1 and getattr(cu_seqlens, "stream_positions", None) is None
        if has_parts or rotary_interleaved or multi_latent_attention or freqs.dim() != 4:
            return self.apply_sliced(t, cu_seqlens, freqs, rotary_interleaved, multi_latent_attention, mscale, cp_group)
        cos, sin = self._angles(cu_seqlens, freqs, mscale, t.dtype)
        width = cos.size(-1)
        rotated, rest = t[..., :width], t[..., width:]
        rotated = _Rotate.apply(rotated, cos, sin)
        return rotated if rest.size(-1) == 0 else torch.cat((rotated, rest), dim=-1)

    def _angles(self, cu_seqlens, freqs, mscale, dtype):
        key = (cu_seqlens, freqs, mscale, dtype)
        if (
            self.key is None
            or any(a is not b for a, b in zip(key[:2], self.key[:2], strict=True))
            or key[2:] != self.key[2:]
        ):
            angles = freqs[:, 0].index_select(0, _positions(cu_seqlens))  # [T, 1, D]
            self.key = key
            self.packed_freqs = ((angles.cos() * mscale).to(dtype), (angles.sin() * mscale).to(dtype))
        return self.packed_freqs


def _positions(cu_seqlens: torch.Tensor) -> torch.Tensor:
    """Return each token's position in its sequence, [T]; a stream with shared prompts or of parts brings them along."""
    given = getattr(cu_seqlens, "stream_positions", None)
    if given is not None:
        return given
    lengths = (cu_seqlens[1:] - cu_seqlens[:-1]).long()
    starts = torch.repeat_interleave(cu_seqlens[:-1].long(), lengths)
    return torch.arange(starts.numel(), device=starts.device) - starts


def install() -> None:
    """Put the vectorised version in Megatron's place. Safe to call again."""
    from megatron.core.models.common.embeddings import rope_utils

    if not isinstance(rope_utils._apply_rotary_pos_emb_thd, PackedRope):
        rope_utils._apply_rotary_pos_emb_thd = PackedRope(
            rope_utils._apply_rotary_pos_emb_bshd, rope_utils._apply_rotary_pos_emb_thd
        )
