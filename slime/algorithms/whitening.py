"""Whitening of advantages over all tokens of all samples on all ranks.

Two passes in float64 (mean first, then squared distances), so that a large common offset does not cancel the spread.
Invariant: the same result for every layout of the tokens over ranks. Every rank calls `reduce_sum` exactly twice, also
one that holds no token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from slime.algorithms.numeric import identity, masked

Reduce = Callable[[torch.Tensor], torch.Tensor]


def masked_moments(
    rows: Sequence[torch.Tensor], masks: Sequence[torch.Tensor], reduce_sum: Reduce | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return (mean, variance, count) over the unmasked tokens of all ranks, float64 scalars.

    The variance has the n / (n - 1) correction when the count is at least 2.

    Raises:
        ValueError: the mask is zero everywhere, on every rank.
    """
    reduce_sum = reduce_sum or identity
    device = rows[0].device if rows else torch.device("cpu")
    values = torch.cat([row.double() for row in rows]) if rows else torch.zeros(0, dtype=torch.float64, device=device)
    mask = torch.cat([m.double() for m in masks]) if rows else values
    total, count = reduce_sum(torch.stack([masked(values, mask).sum(), mask.sum()])).unbind()
    mean = total / count.clamp(min=1)
    squares = reduce_sum(masked((values - mean).square(), mask).sum().reshape(1))[0]
    if count == 0:
        raise ValueError("--normalize-advantages: the loss mask is zero on every token of the rollout")
    return mean, squares / (count - 1 if count >= 2 else count), count


def whiten(
    rows: Sequence[torch.Tensor],
    masks: Sequence[torch.Tensor],
    reduce_sum: Reduce | None = None,
    *,
    shift_mean: bool = True,
    eps: float = 1e-8,
) -> list[torch.Tensor]:
    """Return (x - mean) / sqrt(var + eps) per row, in the dtype of the row; masked tokens are transformed as well.

    With `shift_mean=False` the mean is added back.
    """
    mean, variance, _ = masked_moments(rows, masks, reduce_sum)
    scale = torch.rsqrt(variance + eps)
    offset = 0.0 if shift_mean else mean
    return [((row.double() - mean) * scale + offset).to(row.dtype) for row in rows]
