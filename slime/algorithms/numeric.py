"""Numeric guards shared by the losses: working precision and bounded log-ratios.

Knows nothing about algorithms.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

MAX_LOG_RATIO = 20.0
"""|log ratio| bound before exp: exp(20) = 4.9e8 keeps float32 losses, squares and sums finite."""


def working_precision(x: torch.Tensor) -> torch.Tensor:
    """Return `x` in float32, or unchanged when it is float32 or float64 already."""
    return x if x.dtype in (torch.float32, torch.float64) else x.float()


def bounded_log_ratio(numerator: torch.Tensor, denominator: torch.Tensor) -> torch.Tensor:
    """Return `numerator - denominator` clamped to +-MAX_LOG_RATIO, NaN replaced by 0.

    Outside the bound, and where a stored log-prob is NaN, no gradient flows: such tokens neither move nor destroy
    the model. Use `non_finite_rows` to name the samples they came from.
    """
    ratio = working_precision(numerator) - working_precision(denominator)
    return torch.nan_to_num(ratio, nan=0.0, posinf=MAX_LOG_RATIO, neginf=-MAX_LOG_RATIO).clamp(
        -MAX_LOG_RATIO, MAX_LOG_RATIO
    )


def non_finite_rows(rows: Sequence[torch.Tensor]) -> list[int]:
    """Return the positions of the per-sample tensors that hold a NaN or an infinity."""
    return [position for position, row in enumerate(rows) if not bool(torch.isfinite(row).all())]


def masked(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Return `x * mask` with exact zeros (also for NaN and inf) where the mask is 0."""
    return x.masked_fill(mask == 0, 0.0)


def identity(x: torch.Tensor) -> torch.Tensor:
    """Stand for a collective in a world of one rank."""
    return x
