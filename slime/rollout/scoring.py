"""Rewards for generated samples: timeouts, failures, and letting go of slow judges when a round ends.

Invariants: a reward that raises, times out or is not a finite number makes its sample FAILED (reward 0, out of the
loss, counted, named in the log); the round goes on. When the round is being aborted, rewards that are still being
computed are cancelled and the sample stays unscored. Knows `rm_hub` as two functions, not how it scores.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import traceback
from collections.abc import Awaitable, Callable
from typing import Any

from slime.observability.trace_utils import trace_span
from slime.rollout.generate_state import GenerateState
from slime.utils.hook_forms import is_plain, reward_form
from slime.utils.misc import load_hook
from slime.utils.types import Sample

logger = logging.getLogger(__name__)

NUM_LOGGED_FAILURES = 3  # per round; the rest is counted


class RewardAborted(Exception):
    """The round ended while the reward was being computed."""


async def score_samples(args, samples: list[Sample], evaluation: bool = False) -> None:
    """Set the reward of every sample that has none, in one batch call where the hook asks for batches."""
    unscored = [sample for sample in samples if sample.reward is None]
    if not unscored:
        return
    if _wants_batch(args, unscored):
        await score_group(args, unscored, evaluation)
    elif len(unscored) == 1:
        await _score_one(args, unscored[0], evaluation)
    else:
        await asyncio.gather(*(_score_one(args, sample, evaluation) for sample in unscored))


async def score_each(args, samples: list[Sample]) -> None:
    """What `score_samples` does for each of a training round's samples alone, with one wait for all of them."""
    unscored = [sample for sample in samples if sample.reward is None]
    if len(unscored) < 2 or _is_plain(args, unscored):  # plain functions take turns
        await asyncio.gather(*(_score_one(args, sample, False) for sample in unscored))
        return
    state = GenerateState(args)
    if state.aborted:
        return
    tasks = [asyncio.ensure_future(_traced_reward(args, sample)) for sample in unscored]
    await _wait_for_rewards(args, state, tasks, evaluation=False)
    for sample, task in zip(unscored, tasks, strict=True):
        try:
            reward = _result_of(args, task)
        except RewardAborted:
            continue
        except Exception as error:
            reward = error
        _assign(args, sample, reward, False)


async def _traced_reward(args, sample: Sample) -> Any:
    from slime.rollout.rm_hub import async_rm

    with trace_span(sample, "reward_model"):
        return await async_rm(args, sample)


async def score_group(args, samples: list[Sample], evaluation: bool = False) -> None:
    """Set the rewards of all samples with one batch call."""
    from slime.rollout.rm_hub import batched_async_rm

    with trace_span(samples, "group_reward_model"):
        try:
            rewards = await _bounded(args, samples, lambda: batched_async_rm(args, samples), evaluation)
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
            reward = await _bounded(args, [sample], lambda: async_rm(args, sample), evaluation)
        except RewardAborted:
            return
        except Exception as error:
            reward = error
    _assign(args, sample, reward, evaluation)


def _wants_batch(args, samples: list[Sample]) -> bool:
    if len(samples) == 1 or not args.custom_rm_path or any(sample.custom_rm_path for sample in samples):
        return False
    return reward_form(load_hook(args.custom_rm_path, "custom_rm_path")) != "single"


async def _bounded(args, samples: list[Sample], call: Callable[[], Awaitable], evaluation: bool) -> Any:
    """Await a reward for at most --rm-timeout seconds; give up at once when a training round is aborted.

    Plain functions take turns, and their time counts from when it is their turn.
    """
    state = GenerateState(args)
    async with state.plain_rewards if _is_plain(args, samples) else contextlib.nullcontext():
        if state.aborted and not evaluation:
            raise RewardAborted
        task = asyncio.ensure_future(call())
        await _wait_for_rewards(args, state, [task], evaluation)
    return _result_of(args, task)


async def _wait_for_rewards(args, state: GenerateState, tasks: list[asyncio.Future], evaluation: bool) -> None:
    """Wait for at most --rm-timeout; what is not done then is cancelled. An aborted training round cancels them too."""
    if not evaluation:
        state.reward_tasks.update(tasks)
    try:
        await asyncio.wait(tasks, timeout=args.rm_timeout)
    finally:
        state.reward_tasks.difference_update(tasks)
        for task in tasks:
            if not task.done():
                task.cancel()


def _result_of(args, task: asyncio.Future) -> Any:
    """Raises: TimeoutError for a reward that is not there yet, RewardAborted for a cancelled one, or its own error."""
    if not task.done():
        raise TimeoutError(f"no reward within --rm-timeout {args.rm_timeout} s")
    if task.cancelled():
        raise RewardAborted
    if isinstance(task.exception(), SystemExit):
        raise RuntimeError(f"the reward function raised {task.exception()!r}")
    return task.result()


def _is_plain(args, samples: list[Sample]) -> bool:
    """Whether a user's function that is not async scores these samples."""
    paths = {sample.custom_rm_path or args.custom_rm_path for sample in samples}
    return any(path and is_plain(load_hook(path, "custom_rm_path")) for path in paths)


def _assign(args, sample: Sample, reward: Any, evaluation: bool) -> None:
    reward = _plain_number(reward)
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
    if isinstance(value, dict) or args.custom_reward_post_process_path:
        return None
    try:
        return None if math.isfinite(value) else ValueError(f"the reward is {value}")
    except (TypeError, OverflowError):
        return ValueError(f"the reward is no number: {value!r:.200}")


def _plain_number(reward: Any) -> Any:
    """Scalars of numpy and torch as Python numbers, so that dumps and metrics hold plain values."""
    if isinstance(reward, dict):
        return {name: _plain_number(value) for name, value in reward.items()}
    is_scalar = (
        hasattr(reward, "item") and getattr(reward, "size", None) is not None and not getattr(reward, "shape", ())
    )
    return reward.item() if is_scalar else reward


def mark_reward_failed(args, sample: Sample, error: Exception, evaluation: bool = False) -> None:
    """FAILED, reward 0, no loss; counted and logged with the sample's index."""
    state = GenerateState(args)
    key = _reward_key(args, evaluation)
    sample.status = Sample.Status.FAILED
    sample.reward = {key: 0.0} if key else 0.0
    sample.remove_sample = True
    sample.metadata["reward_error"] = f"{type(error).__name__}: {error}"
    counter = "eval_reward_failed" if evaluation else "reward_failed"
    state.counters[counter] += 1
    if state.counters[counter] <= NUM_LOGGED_FAILURES:
        logger.warning("reward of sample %s failed: %s: %s", sample.index, type(error).__name__, error)
    elif state.counters[counter] == NUM_LOGGED_FAILURES + 1:
        logger.warning("more rewards failed: counted from here on")
    if not evaluation:
        if state.first_failure is None:
            state.first_failure = "".join(traceback.format_exception(error))


def _reward_key(args, evaluation: bool) -> str | None:
    return (args.eval_reward_key or args.reward_key) if evaluation else args.reward_key
