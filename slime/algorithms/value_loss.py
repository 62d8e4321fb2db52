"""Clipped value loss of the critic.

Source: PPO implementation of Schulman et al. (2017); no factor 1/2.
"""

from __future__ import annotations

import torch

from slime.algorithms.numeric import working_precision


def value_loss(
    values: torch.Tensor, old_values: torch.Tensor, returns: torch.Tensor, value_clip: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (token loss, clip fraction), both elementwise over inputs of one shape.

    loss = max((v_c - R)^2, (v - R)^2) with v_c = v_old + clamp(v - v_old, +-value_clip).
    """
    values = working_precision(values)
    old_values, returns = old_values.detach().to(values.dtype), returns.detach().to(values.dtype)
    clipped = old_values + (values - old_values).clamp(-value_clip, value_clip)
    loss = torch.maximum((clipped - returns).square(), (values - returns).square())
    return loss, ((values - old_values).abs() > value_clip).to(values.dtype).detach()


def response_values(outputs: torch.Tensor, total_length: int, response_length: int) -> torch.Tensor:
    """Return the values of the response tokens: the one of token t is read at position t-1, without temperature.

    Args:
        outputs: [total_length] value head outputs of one sample.
    """
    return outputs[total_length - response_length - 1 : total_length - 1]
