"""A micro-batch as one stream of tokens (THD): where its sequences are, and how attention walks them.

Letters: T tokens of the stream, B sequences of a bucket, L longest of a bucket, H heads, D head dim.

Attention over many short sequences is one kernel call per bucket of similar lengths instead of one per sequence. Rows
are padded on the right: under a causal mask no real query sees the padding, and padded queries are dropped.
Invariant: every token of the stream belongs to exactly one bucket row, so scatter(gather(x)) == x.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from megatron.core.packed_seq_params import PackedSeqParams

_MAX_PADDED_SHARE = 0.1
_SLACK_TOKENS = 8


@dataclass(frozen=True)
class Bucket:
    """Sequences of similar length.

    rows: [B * L] positions in the stream (padding repeats the last token), or None when the stream already is the
    bucket, in order and without padding. slots: [tokens] position in B * L of each of its tokens. tokens: [tokens]
    position in the stream of the same.
    """

    num_rows: int
    length: int
    rows: torch.Tensor | None
    slots: torch.Tensor | None
    tokens: torch.Tensor | None


def make_buckets(lengths: list[int], where: torch.device) -> list[Bucket]:
    """Partition sequences by length; a bucket spends at most a tenth of a row (or 8 tokens) on padding.

    >>> [(b.num_rows, b.length) for b in make_buckets([3, 40, 4, 3], torch.device("cpu"))]
    [(1, 40), (3, 4)]
    """
    starts = torch.tensor([0, *lengths]).cumsum(0)
    order = sorted((i for i in range(len(lengths)) if lengths[i]), key=lambda i: -lengths[i])
    buckets, members = [], []
    for i in order:
        if members and lengths[i] + _SLACK_TOKENS < lengths[members[0]] * (1 - _MAX_PADDED_SHARE):
            buckets.append(_bucket(members, lengths, starts, where))
            members = []
        members.append(i)
    if members:
        buckets.append(_bucket(members, lengths, starts, where))
    return buckets


def _bucket(members: list[int], lengths: list[int], starts: torch.Tensor, where: torch.device) -> Bucket:
    members = sorted(members)
    size = torch.tensor([lengths[i] for i in members])
    longest = int(size.max())
    if len(members) == len(lengths) and int(size.min()) == longest:
        return Bucket(len(members), longest, None, None, None)
    step = torch.arange(longest)
    rows = starts[members][:, None] + torch.minimum(step[None], size[:, None] - 1)
    real = (step[None] < size[:, None]).reshape(-1)
    slots = real.nonzero().squeeze(1)
    rows = rows.reshape(-1)
    return Bucket(len(members), longest, rows.to(where), slots.to(where), rows[slots].to(where))


class _GatherRows(torch.autograd.Function):
    """Stream [T, H, D] to padded rows [B * L, H, D] per bucket; gradients of padding are dropped (zero under causality)."""

    @staticmethod
    def forward(ctx, stream, buckets):
        ctx.buckets, ctx.size = buckets, stream.size(0)
        return tuple(stream.index_select(0, bucket.rows) for bucket in buckets)

    @staticmethod
    def backward(ctx, *grads):
        whole = grads[0].new_empty(ctx.size, *grads[0].shape[1:])
        for bucket, grad in zip(ctx.buckets, grads, strict=True):
            whole.index_copy_(0, bucket.tokens, grad.index_select(0, bucket.slots))
        return whole, None


class _ScatterRows(torch.autograd.Function):
    """Padded rows of all buckets back to the stream [T, H, D]."""

    @staticmethod
    def forward(ctx, num_tokens, buckets, *rows):
        ctx.buckets, ctx.sizes = buckets, [r.size(0) for r in rows]
        stream = rows[0].new_empty(num_tokens, *rows[0].shape[1:])
        for bucket, r in zip(buckets, rows, strict=True):
            stream.index_copy_(0, bucket.tokens, r.index_select(0, bucket.slots))
        return stream

    @staticmethod
    def backward(ctx, grad):
        out = []
        for bucket, size in zip(ctx.buckets, ctx.sizes, strict=True):
            rows = grad.new_zeros(size, *grad.shape[1:])
            out.append(rows.index_copy_(0, bucket.slots, grad.index_select(0, bucket.tokens)))
        return None, None, *out


def gather_rows(stream: torch.Tensor, buckets: list[Bucket]) -> list[torch.Tensor]:
    """Return the tokens of each bucket as padded rows, [B, L, H, D]."""
    rows = (stream,) if buckets[0].rows is None else _GatherRows.apply(stream, buckets)
    return [r.view(b.num_rows, b.length, *stream.shape[1:]) for r, b in zip(rows, buckets, strict=True)]


def scatter_rows(rows: list[torch.Tensor], buckets: list[Bucket], num_tokens: int) -> torch.Tensor:
    """Put padded rows [B, L, H, D] of each bucket back in stream order, [T, H, D]."""
    flat = [r.reshape(-1, *r.shape[2:]) for r in rows]
    return flat[0] if buckets[0].rows is None else _ScatterRows.apply(num_tokens, buckets, *flat)


@dataclass
class PackedBatchParams(PackedSeqParams):
    """Megatron's description of a packed stream, plus the attention buckets, made once for all layers."""

    lengths: tuple[int, ...] = ()

    @classmethod
    def from_lengths(cls, lengths: list[int], where: torch.device) -> PackedBatchParams:
        """Describe sequences of `lengths` tokens laid end to end."""
        offsets = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32).to(where)
        longest = max(lengths)
        return cls(
            qkv_format="thd",
            cu_seqlens_q=offsets,
            cu_seqlens_kv=offsets,
            cu_seqlens_q_padded=offsets,
            cu_seqlens_kv_padded=offsets,
            max_seqlen_q=longest,
            max_seqlen_kv=longest,
            lengths=tuple(lengths),
        )

    @cached_property
    def buckets(self) -> list[Bucket]:
        return make_buckets(list(self.lengths), self.cu_seqlens_q.device)
