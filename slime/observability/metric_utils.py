"""Arithmetic of metrics: statistics of a list, merges over ranks, clip ratio, text repetition.

Invariants: an empty input gives an empty result, never nan and never an error; means are weighted by what they are means
of. It does not know samples, flags or processes.
"""

from __future__ import annotations

import math
import statistics
import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from slime.algorithms.passk import pass_at_k

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


def reward_number(reward: Any, key: str | None) -> float | None:
    """Return a reward, of a dict its entry `key`, as a finite number, or None when it is none."""
    if isinstance(reward, Mapping):
        reward = reward.get(key) if key else None
    if reward is None or isinstance(reward, (str, bytes)):
        return None
    try:
        number = float(reward)
    except (TypeError, ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None


def add_prefix(prefix: str, metrics: Mapping[str, float]) -> dict[str, float]:
    """Return `metrics` with `prefix` before each name."""
    return {prefix + name: value for name, value in metrics.items()}


def clip_ratio(lengths: Sequence[int], max_length: int) -> float | None:
    """Return the share of `lengths` that reached `max_length`; [10, 10, 5] under 10 gives 2/3."""
    return mean(float(length >= max_length) for length in lengths)


def has_repetition(text: str) -> bool:
    """Tell whether the end of a long text repeats itself so much that zlib shrinks it more than tenfold."""
    if len(text) <= REPETITION_WINDOW:
        return False
    tail = text[-REPETITION_WINDOW:].encode("utf-8", errors="replace")
    return len(tail) / len(zlib.compress(tail, 9)) > REPETITION_RATIO


# ---- for users' log functions ------------------------------------------------------------------------------------------


def compute_statistics(values: Iterable[float]) -> dict[str, float]:
    """Return {"mean", "median", "max", "min"} of the values."""
    return {name.removeprefix("/"): value for name, value in describe("", values).items()}


def dict_add_prefix(metrics: Mapping[str, float], prefix: str) -> dict[str, float]:
    """Return `metrics` with `prefix` before each name."""
    return add_prefix(prefix, metrics)


def compute_pass_rate(
    flat_rewards: Sequence[float], group_size: int, num_groups: int | None = None
) -> dict[str, float]:
    """Return {"pass@1": ..., "pass@2": ...} of rewards that lie group after group; a reward of 1 is a pass."""
    return pass_at_k([flat_rewards[i : i + group_size] for i in range(0, len(flat_rewards), group_size)])


def compute_rollout_step(args, rollout_id: int) -> int:
    """Return the step under which a log function records a round: its number.

    Where `--wandb-always-use-train-step` shows rounds elsewhere, the tracker does so.
    """
    return rollout_id
