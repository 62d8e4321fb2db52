"""Discounted sums from the right, G_t = r_t + discount * G_{t+1}, as a block-parallel scan.

Right padding with zeros never leaks into real positions. Equal to the serial recursion up to rounding.
"""

from __future__ import annotations

import torch

BLOCK = 128


def discounted_returns(rewards: torch.Tensor, discount: float, block: int = BLOCK) -> torch.Tensor:
    """Return the discounted sums of every row.

    Inside a block of positions one matrix product with the powers of the discount gives all sums; only the carry
    between blocks is serial, so a row of length T costs T / block steps instead of T.

    Args:
        rewards: [B, T] float32 or float64, rows right-padded with zeros.
        discount: 0 <= discount <= 1.
    Returns:
        [B, T], same dtype.
    """
    num_rows, length = rewards.shape
    size = max(1, min(block, length))
    offsets = torch.arange(size, device=rewards.device)
    gaps = offsets[:, None] - offsets[None, :]
    powers = torch.pow(torch.tensor(float(discount), dtype=torch.float64), gaps.clamp(min=0).cpu().double())
    powers = powers.to(rewards).masked_fill(gaps < 0, 0.0)
    carry_powers = torch.pow(torch.tensor(float(discount), dtype=torch.float64), (size - offsets).cpu().double())
    carry_powers = carry_powers.to(rewards)

    num_blocks = -(-length // size)
    padded = rewards.new_zeros(num_rows, num_blocks * size)
    padded[:, :length] = rewards
    blocks = padded.view(num_rows, num_blocks, size) @ powers
    carry = rewards.new_zeros(num_rows)
    for position in range(num_blocks - 1, -1, -1):
        blocks[:, position] += carry[:, None] * carry_powers
        carry = blocks[:, position, 0]
    return blocks.reshape(num_rows, -1)[:, :length]
