"""A micro-batch as one stream of tokens (THD): where its sequences are, and how attention walks them.

Letters: T tokens of the stream, B sequences of a bucket, L longest of a bucket, H heads, D head dim.

Attention over many short sequences is one kernel call per bucket of similar lengths instead of one per sequence. Rows
are padded on the right: under a causal mask no real query sees the padding, and padded queries are dropped.
Sequences may share tokens of the stream (the prompt of a group, `PackedBatchParams.shared`): each bucket row then gathers
its own copy, one of them gives the shared tokens back, and the gradients of all copies are summed.
Invariant: every token of the stream is given back by exactly one bucket row, so scatter(gather(x)) == x.
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
    position in the stream of the same. copies: [copies] position in B * L of what another row gives back, or None.
    """

    num_rows: int
    length: int
    rows: torch.Tensor | None
    slots: torch.Tensor | None
    tokens: torch.Tensor | None
    copies: torch.Tensor | None = None


@dataclass(frozen=True)
class SharedPrompts:
    """Sequence i is stream[prompt_starts[i] :][: prompts[i]] followed by stream[own_starts[i] :][: lengths[i] - prompts[i]].

    The first sequence that names a prompt start gives the prompt back.
    """

    prompt_starts: list[int]
    prompts: list[int]
    own_starts: list[int]


@dataclass(frozen=True)
class Zigzag:
    """Place of a rank among `size` context ranks: of 2 * size equal chunks of a sequence it holds `rank` and the mirrored one."""

    size: int
    rank: int

    def padded(self, length: int) -> int:
        """Return the length of a sequence that divides into chunks."""
        return -(-length // (2 * self.size)) * 2 * self.size


@dataclass(frozen=True)
class ContextKeys:
    """What the queries of a bucket attend to under context parallelism.

    rows: [B * K] positions in the streams of all context ranks, one behind the other, in the order of the sequence.
    mask: [B, 1, L, K] whether a query sees a key.
    """

    length: int
    rows: torch.Tensor
    mask: torch.Tensor


def make_context_keys(lengths: list[int], part: Zigzag, where: torch.device) -> list[ContextKeys]:
    """Return the keys of each bucket of `make_buckets(lengths)`; `lengths` are those of this rank's parts."""
    starts = torch.tensor([0, *lengths]).cumsum(0)
    return [_context_keys(sorted(members), lengths, starts, part, where) for members in group_by_length(lengths)]


def _context_keys(members: list[int], lengths: list[int], starts: torch.Tensor, part: Zigzag, where) -> ContextKeys:
    size = torch.tensor([lengths[i] for i in members])[:, None]
    chunk, last = size // 2, 2 * part.size - 1
    slot = torch.minimum(torch.arange(int(size.max()))[None], size - 1)
    seen_from = torch.where(slot < chunk, part.rank * chunk + slot, (last - part.rank) * chunk + slot - chunk)
    step = torch.arange(int(size.max()) * part.size)[None]
    place = torch.minimum(step, size * part.size - 1)
    number = place // chunk
    holder = torch.minimum(number, last - number)
    offset = place % chunk + torch.where(number > holder, chunk, 0)
    rows = holder * sum(lengths) + starts[members][:, None] + offset
    mask = seen_from[:, :, None] >= step[:, None]
    return ContextKeys(step.numel(), rows.reshape(-1).to(where), mask[:, None].to(where))


def make_buckets(lengths: list[int], where: torch.device, shared: SharedPrompts | None = None) -> list[Bucket]:
    """Partition sequences by length; a bucket spends at most a tenth of a row (or 8 tokens) on padding.

    >>> [(b.num_rows, b.length) for b in make_buckets([3, 40, 4, 3], torch.device("cpu"))]
    [(1, 40), (3, 4)]
    """
    starts = torch.tensor([0, *lengths]).cumsum(0)
    parts = group_by_length(lengths)
    if shared is None:
        return [_bucket(members, lengths, starts, where) for members in parts]
    seen: set[int] = set()
    givers = [not (start in seen or seen.add(start)) for start in shared.prompt_starts]
    return [_shared_bucket(sorted(members), lengths, shared, givers, where) for members in parts]


def group_by_length(lengths: list[int]) -> list[list[int]]:
    """Return the non-empty sequences of each bucket, longest first."""
    order = sorted((i for i in range(len(lengths)) if lengths[i]), key=lambda i: -lengths[i])
    parts: list[list[int]] = []
    for i in order:
        if not parts or lengths[i] + _SLACK_TOKENS < lengths[parts[-1][0]] * (1 - _MAX_PADDED_SHARE):
            parts.append([])
        parts[-1].append(i)
    return parts


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


def _shared_bucket(
    members: list[int], lengths: list[int], shared: SharedPrompts, givers: list[bool], where: torch.device
) -> Bucket:
    def column(values) -> torch.Tensor:
        return torch.tensor([values[i] for i in members])[:, None]

    size, prompt = column(lengths), column(shared.prompts)
    step = torch.arange(int(size.max()))[None]
    index = torch.minimum(step, size - 1)
    in_prompt = index < prompt
    rows = torch.where(in_prompt, column(shared.prompt_starts) + index, column(shared.own_starts) + index - prompt)
    real = step < size
    own = (real & (~in_prompt | column(givers))).reshape(-1)
    rows = rows.reshape(-1)
    slots, copies = own.nonzero().squeeze(1), (real.reshape(-1) & ~own).nonzero().squeeze(1)
    return Bucket(len(members), step.numel(), rows.to(where), slots.to(where), rows[slots].to(where), copies.to(where))


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
        for bucket, grad in zip(ctx.buckets, grads, strict=True):
            if bucket.copies is not None:
                whole.index_add_(0, bucket.rows[bucket.copies], grad.index_select(0, bucket.copies))
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
    shared: SharedPrompts | None = None
    adapter_of_token: torch.Tensor | None = None  # [T] of the stream, where several low-rank adapters are trained
    part: Zigzag | None = None

    @classmethod
    def from_lengths(
        cls,
        lengths: list[int],
        where: torch.device,
        shared: SharedPrompts | None = None,
        positions: torch.Tensor | None = None,
        part: Zigzag | None = None,
    ) -> PackedBatchParams:
        """Describe sequences of `lengths` tokens laid end to end.

        Args:
            positions: [T] of the stream's tokens, where they do not follow from `lengths`: with shared prompts, or when
                the stream holds this rank's `part` of each sequence (`lengths` are then those of whole sequences).
        """
        offsets = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32).to(where)
        if positions is not None:
            offsets.stream_positions = positions  # for packed_rope: the only tensor of ours that Megatron hands it
        longest = max(lengths)
        return cls(
            qkv_format="thd",
            cu_seqlens_q=offsets,
            cu_seqlens_kv=offsets,
            cu_seqlens_q_padded=offsets,
            cu_seqlens_kv_padded=offsets,
            max_seqlen_q=longest,
            max_seqlen_kv=longest,
            lengths=tuple(lengths) if part is None else tuple(length // part.size for length in lengths),
            shared=shared,
            part=part,
        )

    @cached_property
    def buckets(self) -> list[Bucket]:
        return make_buckets(list(self.lengths), self.cu_seqlens_q.device, self.shared)

    @cached_property
    def context_keys(self) -> list[ContextKeys]:
        return make_context_keys(list(self.lengths), self.part, self.cu_seqlens_q.device)
