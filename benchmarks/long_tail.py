"""A generate function whose answers have long-tailed lengths, for `benchmarks/partial_rollout.py`.

The length belongs to the prompt and the place in its group: an answer that is stopped and started again is as long as before.
"""

from __future__ import annotations

import math
import random

MEDIAN, SIGMA = 0.05, 1.2
"""Share of --rollout-max-response-len that half of the answers stay below, and the spread of its logarithm."""


def answer_length(row: int, place: int, limit: int) -> int:
    """Tokens of an answer, log-normal and cut at the limit."""
    share = MEDIAN * math.exp(SIGMA * random.Random(1000 * row + place).gauss(0, 1))
    return max(1, min(limit, int(share * limit)))


async def generate(args, sample, sampling_params):
    """The built-in generator with a length of our choice; a partial response goes on to the same length."""
    from slime.rollout.sglang_rollout import generate as built_in

    limit = sampling_params["max_new_tokens"]
    length = answer_length(int(sample.label), sample.index % args.n_samples_per_prompt, limit)
    return await built_in(args, sample, {**sampling_params, "max_new_tokens": length, "ignore_eos": True})


async def reward(args, sample, **kwargs):
    return float(sample.index % 2)
