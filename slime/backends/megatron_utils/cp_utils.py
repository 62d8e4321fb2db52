"""Import path of the context-parallel helpers for users' losses and off-policy functions.

Those get whole responses here, on every context rank, so gathering and slicing give back what they are given.
"""

from __future__ import annotations

import torch

from slime.algorithms.reduce import Reducer, make_reducer

__all__ = ["all_gather_with_cp", "get_sum_of_sample_mean", "slice_log_prob_with_cp"]


def get_sum_of_sample_mean(
    total_lengths, response_lengths, loss_masks: list[torch.Tensor], calculate_per_token_loss: bool = False, **_layout
) -> Reducer:
    """A function from token values [N] to the sum of the samples' masked means, or of all masked tokens."""
    return make_reducer(loss_masks, per_token=calculate_per_token_loss)


def all_gather_with_cp(tensor: torch.Tensor, total_length: int, response_length: int) -> torch.Tensor:
    """The whole response [L] of a tensor that a loss or off-policy function was given."""
    return tensor


def slice_log_prob_with_cp(log_prob, total_length: int, response_length: int, *_layout, **_more):
    """The part of a response [L] that a loss or off-policy function has to return: all of it."""
    return log_prob
