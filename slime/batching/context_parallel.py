"""Zigzag slicing of sequences over context-parallel ranks, and its inverse.

A sample of T tokens is cut into 2*cp chunks of c = ceil(T / (2*cp)) tokens (the tail is padding); rank r owns chunks r
and 2*cp-1-r, so that every rank has the same share of causal attention. The log-prob of token t is computed at position
t-1: a rank owns the response tokens that follow its logit positions. Ranges are [start, end) from the sequence start;
(0, 0) stands for an empty one. Pure index arithmetic: process groups are the caller's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

Range = tuple[int, int]


@dataclass(frozen=True)
class ZigzagShare:
    """What one rank owns of one sample: two ranges each, in sequence order."""

    chunk_size: int
    chunks: tuple[Range, Range]
    logits: tuple[Range, Range]
    tokens: tuple[Range, Range]

    @property
    def num_tokens(self) -> int:
        """Response tokens whose log-prob this rank computes."""
        return sum(end - start for start, end in self.tokens)


def zigzag_share(total_length: int, response_length: int, cp_size: int, cp_rank: int) -> ZigzagShare:
    """Return the ranges of one rank."""
    chunk = -(-total_length // (2 * cp_size))
    first_logit, last_logit = total_length - response_length - 1, total_length - 1
    chunks = tuple((index * chunk, (index + 1) * chunk) for index in (cp_rank, 2 * cp_size - 1 - cp_rank))
    logits = tuple(_clip(start, end, max(first_logit, 0), last_logit) for start, end in chunks)
    tokens = tuple((start + 1, end + 1) if end > start else (0, 0) for start, end in logits)
    return ZigzagShare(chunk, chunks, logits, tokens)


def _clip(start: int, end: int, low: int, high: int) -> Range:
    start, end = max(start, low), min(end, high)
    return (start, end) if end > start else (0, 0)


def slice_sequence(tokens: torch.Tensor, cp_size: int, cp_rank: int, pad: int | float = 0) -> torch.Tensor:
    """Return this rank's two chunks of a full sequence [T], padded to 2 * chunk_size."""
    if cp_size == 1:
        return tokens
    chunk = -(-len(tokens) // (2 * cp_size))
    padded = tokens.new_full((2 * cp_size * chunk,), pad)
    padded[: len(tokens)] = tokens
    low, high = cp_rank, 2 * cp_size - 1 - cp_rank
    return torch.cat([padded[low * chunk : (low + 1) * chunk], padded[high * chunk : (high + 1) * chunk]])


def slice_response(
    values: torch.Tensor, total_length: int, response_length: int, cp_size: int, cp_rank: int
) -> torch.Tensor:
    """Return this rank's part of a full response-long column [L], in sequence order."""
    if cp_size == 1:
        return values
    prompt_length = total_length - response_length
    share = zigzag_share(total_length, response_length, cp_size, cp_rank)
    return torch.cat(
        [values[max(start - prompt_length, 0) : max(end - prompt_length, 0)] for start, end in share.tokens]
    )


def merge_response(parts: Sequence[torch.Tensor], total_length: int, response_length: int) -> torch.Tensor:
    """Put the parts of all ranks (in rank order) back into one column [L]; inverse of `slice_response`."""
    cp_size = len(parts)
    prompt_length = total_length - response_length
    full = parts[0].new_zeros(response_length)
    for rank, part in enumerate(parts):
        offset = 0
        for start, end in zigzag_share(total_length, response_length, cp_size, rank).tokens:
            if end > start:
                full[start - prompt_length : end - prompt_length] = part[offset : offset + end - start]
            offset += end - start
    return full


def last_token_owner(total_length: int, response_length: int, cp_size: int) -> int:
    """Return the rank that owns the last response token, where an outcome reward belongs."""
    for rank in range(cp_size):
        share = zigzag_share(total_length, response_length, cp_size, rank)
        if any(end == total_length for _, end in share.tokens):
            return rank
    raise ValueError(f"a sample of {total_length} tokens with {response_length} response tokens has no last token")
