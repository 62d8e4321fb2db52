"""Reward normalisation inside the groups of one prompt.

Invariants: a group is what shares a `group_index`, never a position in the batch; a rollout that fanned out into
several training samples counts once in its group's mean and std; everything is float64, and a spread up to 1e-6 is
rounding noise, which gives exact zeros. Plain Python numbers in and out; nothing is known about Sample or flags.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Hashable, Sequence

STD_FLOOR = 1e-6

GROUP_RELATIVE = frozenset({"grpo", "gspo", "cispo", "reinforce_plus_plus_baseline", "rloo", "dr_grpo"})
"""Estimators whose advantage is the reward relative to the group."""
STD_NORMALISED = frozenset({"grpo", "gspo", "cispo"})
"""Of those, the ones that also divide by the group's standard deviation."""


def normalize_group_rewards(
    rewards: Sequence[float],
    group_ids: Sequence[Hashable],
    rollout_ids: Sequence[Hashable] | None = None,
    *,
    std_norm: bool,
    leave_one_out: bool = False,
) -> list[float]:
    """Centre the rewards of each group, optionally scaled.

    Args:
        rewards: one number per sample.
        group_ids: the prompt of each sample.
        rollout_ids: the trajectory of each sample; samples of one trajectory must have equal rewards (up to rounding) and count once.
            None: every sample is its own trajectory.
        std_norm: divide by (unbiased std + 1e-6).
        leave_one_out: subtract the mean of the *other* rollouts (RLOO) instead of the mean of all.
    Returns:
        One number per sample; a group of one rollout, or without spread, gets zeros.
    Raises:
        ValueError: samples of one trajectory disagree on the reward; the rows are named.

    >>> normalize_group_rewards([1, 1, 1, 0], [0, 0, 0, 0], [7, 7, 7, 8], std_norm=False)
    [0.5, 0.5, 0.5, -0.5]
    """
    rollout_ids = range(len(rewards)) if rollout_ids is None else rollout_ids
    groups: dict[Hashable, dict[Hashable, int]] = defaultdict(dict)
    rows = list(zip(group_ids, rollout_ids, strict=True))
    for row, (group, rollout) in enumerate(rows):
        first = groups[group].setdefault(rollout, row)
        if abs(float(rewards[first]) - float(rewards[row])) > STD_FLOOR:
            raise ValueError(
                f"rows {first} and {row} belong to the same rollout {rollout!r} of group {group!r} but have rewards "
                f"{rewards[first]} and {rewards[row]}; give all samples of one rollout the same reward, or use "
                "--custom-reward-post-process-path or --disable-rewards-normalization"
            )
    scaled = {}
    for group, members in groups.items():
        values = [float(rewards[row]) for row in members.values()]
        for rollout, value in zip(members, _normalize(values, std_norm, leave_one_out), strict=True):
            scaled[group, rollout] = value
    return [scaled[row] for row in rows]


def _normalize(values: list[float], std_norm: bool, leave_one_out: bool) -> list[float]:
    n = len(values)
    mean = math.fsum(values) / n
    centred = [value - mean for value in values]
    std = math.sqrt(math.fsum(value * value for value in centred) / (n - 1)) if n > 1 else 0.0
    if std <= STD_FLOOR:
        return [0.0] * n
    if leave_one_out:
        centred = [value * n / (n - 1) for value in centred]
    return [value / (std + STD_FLOOR) for value in centred] if std_norm else centred
