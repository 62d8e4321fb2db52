"""Context parallelism: each sample is cut zigzag over the context ranks for the model, and for the model alone.

Log-probs and values of the parts are put together right after the model, so everything computed from them (ratios of whole
sequences, user functions, metrics, dumps) sees whole responses and is the same on every context rank.
Invariant: the gradient of each rank is that of its own tokens; their sum over the context ranks is the gradient.
Letters: T tokens of this rank's stream, N response tokens of the micro-batch, n of them predicted here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from slime.backends.megatron_utils.packed_sequences import PackedBatchParams, Zigzag
from slime.batching.context_parallel import slice_sequence


def zigzag() -> Zigzag | None:
    """Return this rank's place among the context ranks; None without context parallelism."""
    from megatron.core import parallel_state as mpu

    size = mpu.get_context_parallel_world_size()
    return Zigzag(size, mpu.get_context_parallel_rank()) if size > 1 else None


@dataclass(frozen=True)
class ZigzagStream:
    """One rank's part of a micro-batch. rows: [n] stream positions that predict response tokens; own: [n] which of the N."""

    tokens: torch.Tensor
    positions: torch.Tensor
    packed: PackedBatchParams
    rows: torch.Tensor
    own: torch.Tensor


def lay_zigzag(
    tokens: Sequence[torch.Tensor], responses: Sequence[int], multiple: int, part: Zigzag, where: torch.device
) -> ZigzagStream:
    """Lay this rank's part of every sample end to end, and pad to a multiple of `multiple` with a sequence of zeros."""
    streams, positions, owners, lengths, offset = [], [], [], [], 0
    for ids, response in zip(tokens, responses, strict=True):
        whole = part.padded(len(ids))
        predicts = torch.full((len(ids),), -1)
        predicts[len(ids) - response - 1 : len(ids) - 1] = torch.arange(offset, offset + response)
        streams.append(slice_sequence(ids, part.size, part.rank))
        positions.append(slice_sequence(torch.arange(whole), part.size, part.rank))
        owners.append(slice_sequence(predicts, part.size, part.rank, pad=-1))
        lengths.append(whole)
        offset += response
    padding = -sum(map(len, streams)) % (multiple if multiple % 2 == 0 else 2 * multiple)
    if padding:
        streams.append(torch.zeros(padding, dtype=torch.int64))
        positions.append(slice_sequence(torch.arange(padding * part.size), part.size, part.rank))
        owners.append(torch.full((padding,), -1))
        lengths.append(padding * part.size)
    at, owner = torch.cat(positions), torch.cat(owners)
    rows = (owner >= 0).nonzero().squeeze(1)
    packed = PackedBatchParams.from_lengths(lengths, where, positions=at.to(where), part=part)
    return ZigzagStream(torch.cat(streams), at, packed, rows, owner[rows])


def whole_responses(values: torch.Tensor, own: torch.Tensor | None, size: int) -> torch.Tensor:
    """Put what the context ranks computed for their response tokens together.

    Args:
        values: [n, ...] of this rank, with or without gradient. own: [n] their places among the `size` response tokens, None
            when this rank has them all.
    Returns: [N, ...], equal on all context ranks. Collective over them unless `own` is None.
    """
    return values if own is None else _Join.apply(values, own, size)


def whole_stream(output: torch.Tensor, lengths: Sequence[int], part: Zigzag) -> torch.Tensor:
    """Put the parts [1, T, ...] of the context ranks together: the samples of `lengths` end to end, without padding."""
    starts = torch.tensor([0, *lengths]).cumsum(0).tolist()
    places = [
        slice_sequence(torch.arange(start, start + length), part.size, part.rank, pad=-1)
        for start, length in zip(starts, lengths, strict=False)
    ]
    place = torch.cat(places).to(output.device)
    real = (place >= 0).nonzero().squeeze(1)
    return whole_responses(output[0, real], place[real], starts[-1])[None]


class _Join(torch.autograd.Function):
    @staticmethod
    def forward(ctx, values, own, size):
        import torch.distributed as dist
        from megatron.core import parallel_state as mpu

        ctx.save_for_backward(own)
        whole = values.new_zeros(size, *values.shape[1:])
        whole[own] = values
        dist.all_reduce(whole, group=mpu.get_context_parallel_group())
        return whole

    @staticmethod
    def backward(ctx, grad):
        (own,) = ctx.saved_tensors
        return grad[own], None, None
