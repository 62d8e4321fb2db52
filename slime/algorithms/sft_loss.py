"""Supervised loss: negative log-likelihood of the unmasked response tokens."""

from __future__ import annotations

import torch

from slime.algorithms.reduce import Reducer


def sft_loss(log_probs: torch.Tensor, reducer: Reducer) -> torch.Tensor:
    """Return -reducer(log_probs); log_probs flat [N], reducer from `reduce.make_reducer`."""
    return -reducer(log_probs)
