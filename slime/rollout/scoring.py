"""Rewards for generated samples: timeouts, failures, and letting go of slow judges when a round ends.

Invariants: a reward that raises, times out or is not a finite number makes its sample FAILED (reward 0, out of the
loss, counted, named in the log), as does an execution that made no sample; the round goes on. When the round is being aborted, rewards that are still being
computed are cancelled and the sample stays unscored. Knows `rm_hub` as two functions, not how it scores.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import numbers
import traceback
from collections.abc import Awaitable, Callable
from typing import Any

from slime.observability.trace_utils import trace_span
from slime.rollout.generate_state import GenerateState
from slime.utils.hook_calls import wrong
from slime.utils.hook_forms import is_plain, reward_form
from slime.utils.misc import load_hook
from slime.utils.types import Sample

logger = logging.getLogger(__name__)

MAX_REWARD = 3e38  # training holds rewards in 32-bit floats
NUM_LOGGED_FAILURES = 5  # per round; the rest is counted
TEACHER = "slime.rollout.on_policy_distillation.reward_func"
NUM_LOGGED_INDICES = 32  # of a group that failed together


class RewardAborted(Exception):
    """The round ended while the reward was being computed."""


async def score_samples(args, samples: list[Sample], evaluation: bool = False) -> None:
    """Set the reward of every sample that has none, in one batch call where the hook asks for batches.

    A reward that a generate function has set is taken, unless it is no number.
    """
    for sample in samples:
        problem = None if sample.reward is None else _reward_problem(args, sample.reward, evaluation)
        if problem is not None:
            mark_reward_failed(args, [sample], problem, evaluation)
    unscored = [sample for sample in samples if sample.reward is None]
    if not unscored:
        return
    if len(unscored) > 1 and _wants_batch(args, unscored):
        await score_group(args, unscored, evaluation)
    elif len(unscored) == 1:
        await _score_one(args, unscored[0], evaluation)
    else:
        await asyncio.gather(*(_score_one(args, sample, evaluation) for sample in unscored))


async def score_each(args, samples: list[Sample]) -> None:
    """What `score_samples` does for each of a training round's samples alone, with one wait for all of them."""
    unscored = [sample for sample in samples if sample.reward is None]
    if len(unscored) < 2 or _turns(args, unscored) is not None:
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
    """Set the rewards of the samples with a hook for batches by one call; the others fail alone, not with their group."""
    alone = [sample for sample in samples if not _wants_batch(args, [sample])]
    samples = [sample for sample in samples if _wants_batch(args, [sample])]
    await asyncio.gather(_score_batch(args, samples, evaluation), *(_score_one(args, s, evaluation) for s in alone))


async def _score_batch(args, samples: list[Sample], evaluation: bool) -> None:
    from slime.rollout.rm_hub import batched_async_rm

    if not samples:
        return

    with trace_span(samples, "group_reward_model"):
        try:
            rewards = await _bounded(args, samples, lambda: batched_async_rm(args, samples), evaluation)
            if len(rewards) != len(samples):
                raise ValueError(f"the batch reward returned {len(rewards)} rewards for {len(samples)} samples")
        except RewardAborted:
            return
        except Exception as error:
            mark_reward_failed(args, samples, error, evaluation)
            return
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
    """Whether a hook that takes several samples scores some of these."""
    paths = {sample.custom_rm_path or args.custom_rm_path for sample in samples}
    return any(path and reward_form(load_hook(path, "custom_rm_path")) != "single" for path in paths)


async def _bounded(args, samples: list[Sample], call: Callable[[], Awaitable], evaluation: bool) -> Any:
    """Await a reward for at most --rm-timeout seconds; give up at once when a training round is aborted.

    Where rewards take turns (`_turns`), their time counts from when it is their turn.
    """
    state = GenerateState(args)
    async with _turns(args, samples) or contextlib.nullcontext():
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


def _turns(args, samples: list[Sample]) -> asyncio.Semaphore | None:
    """What bounds how many of these rewards are computed at the same time: users' plain functions, requests to --rm-url, the workers
    of math_verify, a reward model in this process."""
    from slime.rollout.rm_hub import built_in_grader

    state = GenerateState(args)
    paths = {sample.custom_rm_path or args.custom_rm_path for sample in samples}
    if any(path and is_plain(load_hook(path, "custom_rm_path")) for path in paths):
        return state.plain_rewards
    graders = {built_in_grader(args, sample) for sample in samples}
    asks_service = {"remote_rm", "reward_model"} & graders or TEACHER in paths
    if args.rm_url and asks_service:
        return state.remote_rewards
    return next((turns for name, turns in state.graders_turns.items() if name in graders), None)


def _assign(args, sample: Sample, reward: Any, evaluation: bool) -> None:
    reward = _plain_number(reward)
    error = reward if isinstance(reward, Exception) else _reward_problem(args, reward, evaluation)
    if error is None:
        sample.reward = reward
    else:
        path = sample.custom_rm_path or args.custom_rm_path
        if path and error is not reward:  # it did return something
            error = wrong("custom_rm_path", path, f"gave no reward: {error}")
        mark_reward_failed(args, [sample], error, evaluation)


def _reward_problem(args, reward: Any, evaluation: bool) -> Exception | None:
    """Why this is no reward, or None. Without a reward key, dicts are for the user's hooks behind it, and for evaluations."""
    key = _reward_key(args, evaluation)
    value = reward
    if key and isinstance(reward, dict):
        if key not in reward:
            return ValueError(f"the reward {_shown(reward)} has no key {key!r} (--reward-key)")
        value = reward[key]
    if value is None:
        return ValueError("the reward function returned None")
    if args.custom_reward_post_process_path or args.custom_convert_samples_to_train_data_path:
        return None
    if isinstance(value, dict) and not key:
        return None if evaluation else ValueError(f"the reward is a dict of {_shown(list(value))}: give --reward-key")
    if not isinstance(value, (int, float)):
        return ValueError(f"the reward is no number: {_shown(value)}")
    return None if abs(value) < MAX_REWARD else ValueError(f"the reward is no finite number: {_shown(value)}")


def _shown(value: Any) -> str:
    """The beginning of a value's repr, whatever its repr does."""
    try:
        return f"{value!r:.200}"
    except Exception as error:
        return f"a {type(value).__name__} that cannot be shown ({error})"


def _plain_number(reward: Any) -> Any:
    """Numbers of numpy and torch, and arrays of one, as Python numbers, so that dumps and metrics hold plain values."""
    if isinstance(reward, dict):
        return {name: _plain_number(value) for name, value in reward.items()}
    if type(reward) in (bool, int, float):
        return reward
    count = reward.numel() if hasattr(reward, "numel") else getattr(reward, "size", None)
    if hasattr(reward, "item") and count == 1:
        return reward.item()
    return float(reward) if isinstance(reward, numbers.Real) else reward


def mark_reward_failed(
    args, samples: list[Sample], error: Exception, evaluation: bool = False, what: str = "reward"
) -> None:
    """FAILED, reward 0, no loss; counted, and logged in one line with the samples' indices.

    Args:
        what: failed, so that there is no reward: "reward" or "generation".
    """
    state = GenerateState(args)
    key = _reward_key(args, evaluation)
    for sample in samples:
        if sample.is_truncated:
            sample.metadata["was_truncated"] = True
        sample.status = Sample.Status.FAILED
        sample.reward = {key: 0.0} if key else 0.0
        sample.remove_sample = True
        sample.metadata["reward_error"] = f"{type(error).__name__}: {error}"
    counter = f"eval_{what}_failed" if evaluation else f"{what}_failed"
    state.counters[counter] += len(samples)
    state.counters[f"{counter}_lines"] += 1
    lines = state.counters[f"{counter}_lines"]
    if lines <= NUM_LOGGED_FAILURES:
        indices = ", ".join(str(sample.index) for sample in samples[:NUM_LOGGED_INDICES])
        logger.warning("%s of sample %s failed: %s: %s", what, indices, type(error).__name__, error)
    elif lines == NUM_LOGGED_FAILURES + 1:
        logger.warning("%s of more samples failed: counted from here on", what)
    if not evaluation and state.first_failure is None:
        state.first_failure = "".join(traceback.format_exception(error))


def _reward_key(args, evaluation: bool) -> str | None:
    return (args.eval_reward_key or args.reward_key) if evaluation else args.reward_key
