"""Rewards for generated samples: timeouts, failures, and letting go of slow judges when a round ends.

Invariants: a reward that raises, times out or is not a finite number makes its sample FAILED (reward 0, out of the
loss, counted, named in the log); the round goes on. When the round is being aborted, rewards that are still being
computed are cancelled and the sample stays unscored. Knows `rm_hub` as two functions, not how it scores.
"""

from __future__ import annotations

import asyncio
import logging
import math
import traceback
from collections.abc import Awaitable
from typing import Any

from slime.observability.trace_utils import trace_span
from slime.rollout.generate_state import GenerateState
from slime.utils.hook_forms import reward_form
from slime.utils.misc import load_hook
from slime.utils.types import Sample

logger = logging.getLogger(__name__)


class RewardAborted(Exception):
    """The round ended while the reward was being computed."""


async def score_samples(args, samples: list[Sample], evaluation: bool = False) -> None:
    """Set the reward of every sample that has none, in one batch call where the hook asks for batches."""
    unscored = [sample for sample in samples if sample.reward is None]
    if not unscored:
        return
    if _wants_batch(args, unscored):
        await score_group(args, unscored, evaluation)
    else:
        await asyncio.gather(*(_score_one(args, sample, evaluation) for sample in unscored))


async def score_group(args, samples: list[Sample], evaluation: bool = False) -> None:
    """Set the rewards of all samples with one batch call."""
    from slime.rollout.rm_hub import batched_async_rm

    with trace_span(samples, "group_reward_model"):
        try:
            rewards = await _bounded(args, batched_async_rm(args, samples), evaluation)
            if len(rewards) != len(samples):
                raise ValueError(f"the batch reward returned {len(rewards)} rewards for {len(samples)} samples")
        except RewardAborted:
            return
        except Exception as error:
            rewards = [error] * len(samples)
    for sample, reward in zip(samples, rewards, strict=True):
        _assign(args, sample, reward, evaluation)


async def _score_one(args, sample: Sample, evaluation: bool) -> None:
    from slime.rollout.rm_hub import async_rm

    with trace_span(sample, "reward_model"):
        try:
            reward = await _bounded(args, async_rm(args, sample), evaluation)
        except RewardAborted:
            return
        except Exception as error:
            reward = error
    _assign(args, sample, reward, evaluation)


def _wants_batch(args, samples: list[Sample]) -> bool:
    if len(samples) == 1 or not args.custom_rm_path or any(sample.custom_rm_path for sample in samples):
        return False
    return reward_form(load_hook(args.custom_rm_path, "custom_rm_path")) != "single"


async def _bounded(args, call: Awaitable, evaluation: bool) -> Any:
    """Await a reward for at most --rm-timeout seconds; give up at once when a training round is aborted."""
    state = GenerateState(args)
    task = asyncio.ensure_future(call)
    if not evaluation:
        state.reward_tasks.add(task)
    try:
        await asyncio.wait({task}, timeout=args.rm_timeout)
    finally:
        state.reward_tasks.discard(task)
        if not task.done():
            task.cancel()
    if not task.done():
        raise TimeoutError(f"no reward within --rm-timeout {args.rm_timeout} s")
    if task.cancelled():
        raise RewardAborted
    return task.result()


def _assign(args, sample: Sample, reward: Any, evaluation: bool) -> None:
    error = reward if isinstance(reward, Exception) else _reward_problem(args, reward, evaluation)
    if error is None:
        sample.reward = reward
    else:
        mark_reward_failed(args, sample, error, evaluation)


def _reward_problem(args, reward: Any, evaluation: bool) -> Exception | None:
    """Why this is no reward, or None. Dicts without a reward key are passed on to the post-process hook."""
    key = _reward_key(args, evaluation)
    value = reward
    if key and isinstance(reward, dict):
        if key not in reward:
            return ValueError(f"the reward {reward!r:.200} has no key {key!r} (--reward-key)")
        value = reward[key]
    if value is None:
        return ValueError("the reward function returned None")
    if isinstance(value, float) and not math.isfinite(value):
        return ValueError(f"the reward is {value}")
    return None


def mark_reward_failed(args, sample: Sample, error: Exception, evaluation: bool = False) -> None:
    """FAILED, reward 0, no loss; counted and logged with the sample's index."""
    state = GenerateState(args)
    key = _reward_key(args, evaluation)
    sample.status = Sample.Status.FAILED
    sample.reward = {key: 0.0} if key else 0.0
    sample.remove_sample = True
    sample.metadata["reward_error"] = f"{type(error).__name__}: {error}"
    logger.warning("reward of sample %s failed: %s: %s", sample.index, type(error).__name__, error)
    if not evaluation:
        state.counters["reward_failed"] += 1
        if state.first_failure is None:
            state.first_failure = "".join(traceback.format_exception(error))


def _reward_key(args, evaluation: bool) -> str | None:
    return (args.eval_reward_key or args.reward_key) if evaluation else args.reward_key
