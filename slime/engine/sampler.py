"""Choose next tokens and their log-probabilities from logits.

One uniform number per row through the inverse of the cumulative distribution; the number is a function of the request's
seed and the token's index alone, so a seeded request gives the same tokens whatever else is in the batch.
Invariants: log-probabilities are log_softmax(logits / temperature) in fp32, before top-p, top-k and min-p (temperature 0:
greedy, values at temperature 1); the generator makes them relative to the kept tokens where a request asks for those.
Knows rows, not requests.
"""

from __future__ import annotations

import hashlib

import numpy as np
import torch

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX1, _MIX2 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
MAX_TOPK_SELECT = 1024


def seed_of(*parts: object) -> int:
    """Return a 64-bit seed that depends on every part.

    >>> seed_of(1, "a") == seed_of(1, "a"), seed_of(1, "a") == seed_of(1, "b")
    (True, False)
    """
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=8).digest(), "little")


def uniform(seeds: np.ndarray, counters: np.ndarray) -> np.ndarray:
    """Return float32 numbers in [0, 1), one per (seed uint64, counter): splitmix64 of seed + counter, applied twice.

    23 bits, so that number * total < total in float32.
    """
    x = seeds + (counters.astype(np.uint64) + np.uint64(1)) * _GOLDEN
    for _ in range(2):
        x = (x ^ (x >> np.uint64(30))) * _MIX1
        x = (x ^ (x >> np.uint64(27))) * _MIX2
        x = x ^ (x >> np.uint64(31))
    return (x >> np.uint64(41)).astype(np.float32) * np.float32(2.0**-23)


def log_probabilities(logits: torch.Tensor, temperatures: np.ndarray) -> torch.Tensor:
    """Return log_softmax(logits / temperature) [B, V]; temperature 0 counts as 1."""
    if not np.all(temperatures == 1.0):
        safe = np.where(temperatures > 0, temperatures, 1.0).astype(np.float32)
        logits = logits / torch.from_numpy(safe).to(logits.device)[:, None]
    return logits.log_softmax(-1)


def draw(log_probs: torch.Tensor, uniforms: np.ndarray, greedy: np.ndarray) -> torch.Tensor:
    """Draw one token per row of log_probs [B, V]; rows in the bool array `greedy` take the most likely one."""
    if greedy.all():
        return log_probs.argmax(-1)
    numbers = torch.from_numpy(uniforms).to(log_probs.device)[:, None]
    tokens = _inverse_cdf(log_probs.exp(), numbers)
    if greedy.any():
        mask = torch.from_numpy(greedy).to(log_probs.device)
        tokens = torch.where(mask, log_probs.argmax(-1), tokens)
    return tokens


def candidates(
    log_probs: torch.Tensor, top_p: np.ndarray, top_k: np.ndarray, min_p: np.ndarray
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (ids [B, C], probabilities [B, C]) by falling probability; 0 for what top-k (0 = all), top-p or min-p drop.

    Arrays are [B]; C is the vocabulary, or the largest top-k.
    """
    device = log_probs.device
    limit = int(top_k.max()) if top_k.all() else 0
    if 0 < limit <= min(MAX_TOPK_SELECT, log_probs.shape[-1]):
        values, ids = log_probs.topk(limit, -1)
    else:
        values, ids = log_probs.sort(dim=-1, descending=True, stable=True)
    p = values.exp()
    column = torch.from_numpy
    keep = p.cumsum(-1) - p <= column(top_p).to(device)[:, None]
    keep &= p >= column(min_p).to(device)[:, None] * p[:, :1]
    ks = column(np.where(top_k > 0, top_k, log_probs.shape[-1])).to(device)
    keep &= torch.arange(p.shape[-1], device=device)[None] < ks[:, None]
    keep[:, 0] = True
    return ids, p * keep


def draw_among(ids: torch.Tensor, p: torch.Tensor, uniforms: np.ndarray) -> torch.Tensor:
    """Draw one token per row of `candidates`."""
    chosen = _inverse_cdf(p, torch.from_numpy(uniforms).to(p.device)[:, None])
    return ids.gather(1, chosen[:, None])[:, 0]


def _inverse_cdf(p: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    cumulative = p.cumsum(-1)
    targets = numbers * cumulative[:, -1:]
    return torch.searchsorted(cumulative, targets, right=True)[:, 0].clamp_(max=p.shape[-1] - 1)
