"""From token losses to one number per micro-batch, with denominators that no layout can change.

A *rollout* (trajectory) may be split over several samples, micro-batches and ranks; its denominator is the mask sum of
all its samples, computed once over the whole batch (`rollout_mask_sums`) before any packing.

The final gradient, whatever the number of micro-batches, dp and cp size:
    per-rollout mode    d( sum over rollouts of the masked mean / global_batch_size )
    per-token mode      d( sum of masked tokens / number of tokens of the step )
so a reducer returns plain *sums* S, and the caller divides by `global_batch_size` or by the step's `num_tokens`.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence

import torch

from slime.algorithms.numeric import masked, working_precision

Reducer = Callable[[torch.Tensor], torch.Tensor]


def rollout_mask_sums(mask_sums: Sequence[float], rollout_ids: Sequence[Hashable]) -> list[float]:
    """Return, for each sample, the mask sum of all samples with its rollout id.

    >>> rollout_mask_sums([2, 2, 3, 0], [0, 0, 1, 2])
    [4, 4, 3, 0]
    """
    totals: dict[Hashable, float] = {}
    for total, rollout in zip(mask_sums, rollout_ids, strict=True):
        totals[rollout] = totals.get(rollout, 0) + total
    return [totals[rollout] for rollout in rollout_ids]


def num_tokens(loss_masks: Sequence[torch.Tensor]) -> int:
    """Return the token count of per-token mode: a fully masked sample counts as one token."""
    return int(row_sums(loss_masks).clamp(min=1).sum())


def row_sums(loss_masks: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the sum of each mask, int64 [number of masks], without a call per mask."""
    if not loss_masks:
        return torch.zeros(0, dtype=torch.int64)
    flat = torch.cat(list(loss_masks))
    ends = torch.tensor([len(mask) for mask in loss_masks], device=flat.device).cumsum(0)
    totals = torch.cat([flat.new_zeros(1, dtype=torch.int64), flat.to(torch.int64).cumsum(0)])[ends]
    return totals.diff(prepend=totals.new_zeros(1))


def make_reducer(
    loss_masks: Sequence[torch.Tensor],
    mask_sums: Sequence[float] | torch.Tensor | None = None,
    *,
    per_token: bool = False,
) -> Reducer:
    """Return `reducer(x flat [N]) -> scalar` for one micro-batch.

    Args:
        loss_masks: per-sample masks aligned with x; under context parallelism the local slices.
        mask_sums: `rollout_mask_sums` of the same samples (over full responses and all siblings). None: the plain
            per-sample mean, for data without rollout bookkeeping; wrong with fan-out or local slices.
        per_token: sum over tokens instead of the sum of per-rollout means.
    Returns:
        S = sum of m*x / max(mask_sum, 1), or the sum of m*x; masked tokens never count, not even as NaN.
    """
    if not loss_masks:
        return lambda x: working_precision(x).sum()
    weights = torch.cat(list(loss_masks)).float()
    if not per_token:
        if mask_sums is None:
            mask_sums = row_sums(loss_masks)
        lengths = torch.tensor([len(mask) for mask in loss_masks], device=weights.device)
        sums = torch.as_tensor(mask_sums, dtype=torch.float32, device=weights.device).clamp(min=1.0)
        weights = weights / torch.repeat_interleave(sums, lengths)

    def reducer(x: torch.Tensor) -> torch.Tensor:
        x = working_precision(x)
        return torch.dot(masked(x, weights), weights.to(x.dtype))

    return reducer
