"""Built-in dynamic filters: keep a prompt only if its responses differ in reward.

Invariants: rewards are compared in double precision, one per execution (fan-out siblings count once); a group without
a score is dropped as `unscored`, never an error; a sample whose reward failed has no score. A single sample has no spread,
so it is kept.
"""

from __future__ import annotations

import statistics
from dataclasses import replace
from typing import Any

from slime.rollout.base_types import leaves_of
from slime.rollout.filter_hub.base_types import DynamicFilterOutput

MIN_STD = 1e-6


def check_reward_nonzero_std(args, samples: list, **kwargs: Any) -> DynamicFilterOutput:
    """Keep the group iff the unbiased std of its rewards exceeds 1e-6."""
    rewards = group_rewards(args, samples)
    if not rewards:
        return DynamicFilterOutput(keep=False, reason="unscored")
    if len(rewards) == 1 or statistics.stdev(rewards) > MIN_STD:
        return DynamicFilterOutput(keep=True)
    return DynamicFilterOutput(keep=False, reason=f"zero_std_{round(rewards[0], 1)}")


def check_reward_nonzero_std_with_fallback(args, samples: list, **kwargs: Any) -> DynamicFilterOutput:
    """The same, but a group is kept when dropping it would mean fetching new prompts."""
    return replace(check_reward_nonzero_std(args, samples), keep_when_insufficient=True)


def group_rewards(args, samples: list) -> list[float]:
    """One reward per execution of a group, executions without a reward left out."""
    rewards = []
    for item in samples:
        scored = [leaf for leaf in leaves_of(item) if leaf.reward is not None and leaf.has_verdict]
        if scored:
            value = scored[0].get_reward_value(args)
            if value is not None:
                rewards.append(float(value))
    return rewards
