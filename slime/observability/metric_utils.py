"""Arithmetic of metrics: statistics of a list, merges over ranks, pass rates, text repetition.

Invariants: an empty input gives an empty result, never nan and never an error; means are weighted by what they are means
of. It does not know samples, flags or processes.
"""

from __future__ import annotations

import math
import statistics
import zlib
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

REPETITION_WINDOW = 10_000  # characters; shorter responses are never called repetitive
REPETITION_RATIO = 10.0


def describe(name: str, values: Iterable[float]) -> dict[str, float]:
    """Return `{name}/mean`, `/median`, `/max` and `/min` of `values`; {} when there are none."""
    values = [float(v) for v in values]
    if not values:
        return {}
    return {
        f"{name}/mean": math.fsum(values) / len(values),
        f"{name}/median": statistics.median(values),
        f"{name}/max": max(values),
        f"{name}/min": min(values),
    }


def mean(values: Iterable[float]) -> float | None:
    """Return the arithmetic mean, or None for no values."""
    values = list(values)
    return math.fsum(values) / len(values) if values else None


def add_prefix(prefix: str, metrics: Mapping[str, float]) -> dict[str, float]:
    """Return `metrics` with `prefix` before each name."""
    return {prefix + name: value for name, value in metrics.items()}


def merge_weighted_means(parts: Iterable[Mapping[str, tuple[float, float]]]) -> dict[str, float]:
    """Merge (sum, count) pairs of several ranks into means: sum of sums over sum of counts.

    Example: rank A holds 9 tokens of mean 1 as (9, 9), rank B one token of 11 as (11, 1): the merged mean is 2.
    A name whose counts add up to zero is left out.
    """
    sums: dict[str, float] = defaultdict(float)
    counts: dict[str, float] = defaultdict(float)
    for part in parts:
        for name, (total, count) in part.items():
            sums[name] += total
            counts[name] += count
    return {name: sums[name] / counts[name] for name in sums if counts[name] > 0}


def merge_max(parts: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Return the maximum over ranks of every name."""
    merged: dict[str, float] = {}
    for part in parts:
        for name, value in part.items():
            merged[name] = max(value, merged.get(name, value))
    return merged


def clip_ratio(lengths: Sequence[int], max_length: int) -> float | None:
    """Return the share of `lengths` that reached `max_length`; [10, 10, 5] under 10 gives 2/3."""
    return mean(float(length >= max_length) for length in lengths)


def pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    """Return the unbiased chance that k of `num_samples` draws hold a correct one (Chen et al. 2021, eq. 1)."""
    if num_samples - num_correct < k:
        return 1.0
    return 1.0 - math.prod(1.0 - k / i for i in range(num_samples - num_correct + 1, num_samples + 1))


def pass_rates(correct_by_prompt: Iterable[Sequence[bool]]) -> dict[str, float]:
    """Return {"pass@1", "pass@2", "pass@4", ...} over prompts that may differ in their number of samples.

    For each k the mean runs over the prompts with at least k samples. One sample everywhere gives {}.
    """
    groups = [(len(flags), sum(map(bool, flags))) for flags in correct_by_prompt if len(flags) > 0]
    largest = max((n for n, _ in groups), default=0)
    if largest < 2:
        return {}
    exponents = range(largest.bit_length())
    rates = {}
    for k in (2**e for e in exponents):
        rates[f"pass@{k}"] = mean(pass_at_k(n, c, k) for n, c in groups if n >= k)
    return rates


def has_repetition(text: str) -> bool:
    """Tell whether the end of a long text repeats itself so much that zlib shrinks it more than tenfold."""
    if len(text) <= REPETITION_WINDOW:
        return False
    tail = text[-REPETITION_WINDOW:].encode("utf-8", errors="replace")
    return len(tail) / len(zlib.compress(tail, 9)) > REPETITION_RATIO
