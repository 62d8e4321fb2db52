r"""Rewards by type, or by the user's own function.

`async_rm(args, sample)` scores one sample, `batched_async_rm(args, samples)` several. Order: the sample's
`custom_rm_path`, `--custom-rm-path`, then the type in `metadata["rm_type"]` or `--rm-type`. The prefix `boxed_` grades
the content of the last `\boxed{}` as the answer itself. A reward that cannot be computed raises; what to do then, and
time limits, are the rollout loop's business. Built-in graders return within a millisecond or so; `math_verify`, which
can take long, runs in processes of its own.
"""

from __future__ import annotations

import asyncio
import random

from slime.rollout.rm_hub import math_utils
from slime.rollout.rm_hub.boxed import extract_boxed_answer
from slime.rollout.rm_hub.custom import custom_rewards
from slime.rollout.rm_hub.deepscaler import get_deepscaler_rule_based_reward
from slime.rollout.rm_hub.f1 import f1_score
from slime.rollout.rm_hub.gpqa import compute_gpqa_reward
from slime.rollout.rm_hub.ifbench import compute_ifbench_reward
from slime.rollout.rm_hub.math_dapo_utils import compute_score as compute_dapo_score
from slime.rollout.rm_hub.math_utils import grade_answer_verl
from slime.rollout.rm_hub.math_verify_pool import math_verify_reward
from slime.rollout.rm_hub.remote import remote_rm
from slime.rollout.rm_hub.reward_model import reward_model
from slime.utils.async_utils import gather_or_cancel

__all__ = ["RM_TYPES", "async_rm", "batched_async_rm", "get_deepscaler_rule_based_reward", "grade_answer_verl"]


async def async_rm(args, sample, **kwargs):
    """Return the reward of one sample: a number, or a dict.

    Raises:
        ValueError: no reward is configured, the type is unknown, or the sample lacks the label it needs.
    """
    path = sample.custom_rm_path or args.custom_rm_path
    if path:
        return (await custom_rewards(args, path, [sample], **kwargs))[0]
    rm_type = _rm_type(args, sample)
    name = rm_type.removeprefix("boxed_")
    if name not in RM_TYPES:
        raise ValueError(_unknown(rm_type, sample))
    response = sample.response
    if name != rm_type:
        response = extract_boxed_answer(response or "") or ""
        if name in BARE_GRADERS:
            return BARE_GRADERS[name](response, sample)
    if name in ASYNC_GRADERS:
        return await ASYNC_GRADERS[name](args, response, sample)
    return GRADERS[name](response, sample)


def built_in_grader(args, sample) -> str | None:
    """The type that grades the sample, without its prefix; None where a function of the user's does."""
    return None if sample.custom_rm_path or args.custom_rm_path else _rm_type(args, sample).removeprefix("boxed_")


def _rm_type(args, sample) -> str:
    return str((sample.metadata or {}).get("rm_type") or args.rm_type or "").strip()


async def batched_async_rm(args, samples: list, **kwargs) -> list:
    """Return the rewards of several samples in order; samples that share a user's function are scored in one call."""
    by_path: dict[str, list[int]] = {}
    rewards: list = [None] * len(samples)
    built_in = []
    for position, sample in enumerate(samples):
        path = sample.custom_rm_path or args.custom_rm_path
        if path:
            by_path.setdefault(path, []).append(position)
        else:
            built_in.append(position)

    async def score(path: str, positions: list[int]) -> None:
        scores = await custom_rewards(args, path, [samples[p] for p in positions], **kwargs)
        for position, reward in zip(positions, scores, strict=True):
            rewards[position] = reward

    async def score_built_in(position: int) -> None:
        rewards[position] = await async_rm(args, samples[position])

    await gather_or_cancel([*(score(*item) for item in by_path.items()), *(score_built_in(p) for p in built_in)])
    return rewards


def _label(sample) -> str:
    """Return the label as text; a missing one is an error, the number 0 is a label."""
    text = math_utils.label_text(sample.label)
    if text is None:
        raise ValueError(
            f"sample {sample.index} has no label (got {sample.label!r}); set --label-key to the column that holds the answer"
        )
    return text


def _math(response, sample) -> int:
    return int(grade_answer_verl(response, _label(sample)))


def _bare_math(answer: str, sample) -> int:
    return int(math_utils.grade_math_answer(answer, _label(sample)))


def _deepscaler(response, sample) -> int:
    return get_deepscaler_rule_based_reward(response, _label(sample))


def _dapo(response, sample) -> dict:
    return compute_dapo_score(response, sample.label)


def _bare_dapo(answer: str, sample) -> dict:
    return compute_dapo_score(f"Answer: {answer}" if answer else "", sample.label)


async def _math_verify(args, response, sample) -> float:
    if "\\boxed" not in response and "$" not in response:
        response = f"\\boxed{{{response}}}"
    return await math_verify_reward(response, _label(sample), args.rm_timeout)


async def _ifbench(args, response, sample) -> float:
    return await asyncio.to_thread(compute_ifbench_reward, response, sample.label, sample.metadata)


GRADERS = {
    "math": _math,
    "dapo": _dapo,
    "deepscaler": _deepscaler,
    "f1": lambda response, sample: f1_score(response, sample.label),
    "gpqa": lambda response, sample: compute_gpqa_reward(response, sample.label, sample.metadata),
    "random": lambda response, sample: random.randint(0, 1),
}
BARE_GRADERS = {"math": _bare_math, "deepscaler": _bare_math, "dapo": _bare_dapo}
ASYNC_GRADERS = {
    "remote_rm": remote_rm,
    "reward_model": reward_model,
    "math_verify": _math_verify,
    "ifbench": _ifbench,
}
RM_TYPES = tuple(sorted([*GRADERS, *ASYNC_GRADERS]))


def _unknown(rm_type: str, sample) -> str:
    choices = f"choose one of {', '.join(RM_TYPES)}, with or without the prefix boxed_, or give --custom-rm-path"
    if not rm_type:
        return f"sample {sample.index} has no reward type: neither --rm-type nor metadata.rm_type is set; {choices}"
    return f"--rm-type {rm_type!r} is unknown; {choices}"
