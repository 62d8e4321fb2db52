"""Import path of the context-parallel helpers for users' losses and off-policy functions.

Those get whole responses here, on every context rank, so gathering and slicing give back what they are given.
"""

from __future__ import annotations

import torch

from slime.algorithms.reduce import Reducer, make_reducer

__all__ = [
    "all_gather_with_cp",
    "get_logits_and_tokens_offset_with_cp",
    "get_sum_of_sample_mean",
    "slice_log_prob_with_cp",
]


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


def get_logits_and_tokens_offset_with_cp(total_length: int, response_length: int, *_layout, **_more) -> tuple:
    """(size, chunks, logits, tokens): where this rank's two parts of a sample lie, as pairs of (start, stop) pairs.

    Logits and tokens are those of the response. The first part is the whole sample here and the second one is empty, so that what is
    cut by it fits what a loss or off-policy function was given.
    """
    prompt, end = total_length - response_length, (total_length, total_length)
    logits = ((prompt - 1, total_length - 1), (total_length - 1, total_length - 1))
    return total_length, ((0, total_length), end), logits, ((prompt, total_length), end)
