"""Corrections for the gap between the engine that sampled and the trainer that learns.

Behaviour ratio of a token: w = exp(train_log_prob - rollout_log_prob), bounded, without gradient.
    TIS     multiply the token loss by clamp(w, low, high)        (truncated importance sampling)
    IcePop  multiply by w inside [low, high], drop the token outside
"""

from __future__ import annotations

import torch

from slime.algorithms.numeric import bounded_log_ratio


@torch.no_grad()
def behaviour_ratio(train_log_probs: torch.Tensor, rollout_log_probs: torch.Tensor) -> torch.Tensor:
    """Return exp(train - rollout) elementwise, finite for any input."""
    return torch.exp(bounded_log_ratio(train_log_probs, rollout_log_probs))


@torch.no_grad()
def tis_weights(
    train_log_probs: torch.Tensor, rollout_log_probs: torch.Tensor, low: float, high: float
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return (weights, metrics) of truncated importance sampling, elementwise.

    Metrics: `tis` = w, `tis_clipfrac` = 1 where clamping changed w, `tis_abs` = |w - 1|.
    """
    ratio = behaviour_ratio(train_log_probs, rollout_log_probs)
    weights = ratio.clamp(low, high)
    return weights, _metrics(ratio, weights)


@torch.no_grad()
def icepop_weights(
    train_log_probs: torch.Tensor, rollout_log_probs: torch.Tensor, low: float, high: float
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return (weights, metrics) of IcePop: w where low <= w <= high, else 0. Source: Ling team (2025)."""
    ratio = behaviour_ratio(train_log_probs, rollout_log_probs)
    weights = torch.where((ratio >= low) & (ratio <= high), ratio, torch.zeros_like(ratio))
    return weights, _metrics(ratio, weights)


def _metrics(ratio: torch.Tensor, weights: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"tis": ratio, "tis_clipfrac": (weights != ratio).to(ratio.dtype), "tis_abs": (ratio - 1).abs()}
