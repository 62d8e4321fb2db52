"""Evaluation: every held-out set, n samples per prompt, no filter and no buffer.

Invariants: results are in the order of the prompts; each sample has its own sampling parameters; a data set is read
once per process. Does not know metrics.
"""

from __future__ import annotations

import asyncio
import copy
import logging
import math
import uuid
from collections.abc import Coroutine, Mapping
from dataclasses import replace
from typing import Any

from slime.observability.rollout_metrics import logged_reward
from slime.rollout import generation
from slime.rollout.base_types import RolloutFnEvalOutput, leaves_of
from slime.rollout.generate_state import GenerateState, sampling_seed, uses_sampling_seeds
from slime.rollout.prompt_format import uses_list_generate
from slime.utils.async_utils import gather_or_cancel
from slime.utils.data import PromptSet, RowFormat
from slime.utils.types import Sample

logger = logging.getLogger(__name__)

_prompt_sets: dict[str, PromptSet] = {}


async def eval_rollout(args, rollout_id: int) -> RolloutFnEvalOutput:
    """Evaluate on all of `args.eval_datasets` at once."""
    if args.group_rm:
        raise ValueError("--group-rm is not supported in evaluation; give the data sets their own reward")
    state = GenerateState(args)
    for what in ("reward", "generation"):
        state.counters[f"eval_{what}_failed"] = state.counters[f"eval_{what}_failed_lines"] = 0
    state.progress.set_total("eval", None)
    results = await gather_or_cancel(
        [eval_rollout_single_dataset(args, rollout_id, config) for config in args.eval_datasets]
    )
    data = {name: result for part in results for name, result in part.items()}
    metrics = {}
    for what in ("reward", "generation"):
        if num_failed := state.counters[f"eval_{what}_failed"]:
            logger.warning("evaluation at round %d: %d %ss failed and are left out", rollout_id, num_failed, what)
            metrics[f"eval/{what}_failed"] = num_failed
    return RolloutFnEvalOutput(data=data, metrics=metrics)


async def eval_rollout_single_dataset(args, rollout_id: int, dataset_cfg) -> dict[str, dict[str, Any]]:
    """`{name: {"rewards", "truncated", "samples"}}` of one data set, and "unfinished" samples if it was stopped early."""
    state = GenerateState(args)
    prompts = await asyncio.to_thread(_load_prompts, args, state, dataset_cfg)
    calls = [
        call for number, prompt in enumerate(prompts.samples) for call in _calls(args, dataset_cfg, prompt, number)
    ]
    if dataset_cfg.eval_early_stop_remaining is None:
        results, num_unfinished = await gather_or_cancel(calls), 0
    else:
        results, num_unfinished = await _gather_until_idle(calls, dataset_cfg)
    samples = sorted(leaves_of(results), key=lambda sample: sample.index)
    result = result_of(args, samples)
    return {dataset_cfg.name: result | ({"unfinished": num_unfinished} if num_unfinished else {})}


def result_of(args, samples: list[Sample]) -> dict[str, list]:
    """`{"rewards", "truncated", "samples"}` of scored samples."""
    key = args.eval_reward_key or args.reward_key
    return {
        "rewards": [_reward(sample, key) for sample in samples],
        "truncated": [sample.is_truncated for sample in samples],
        "samples": samples,
    }


def _reward(sample: Sample, key: str | None) -> Any:
    """The sample's number, nan where the reward failed; sets with plain rewards may stand beside sets with dicts."""
    if sample.metadata.get("reward_error"):
        return math.nan  # as in the column raw_reward: users' functions may still add up
    return sample.reward[key] if key and isinstance(sample.reward, Mapping) else sample.reward


def read_eval_sets(args) -> None:
    """Read all of `args.eval_datasets` now, so that a row that cannot be used ends a run at its start.

    Raises: ValueError naming the set, the file and the line, or that the set is too small.
    """
    state = GenerateState(args)
    for config in args.eval_datasets:
        _load_prompts(args, state, config)


def _calls(args, dataset_cfg, prompt: Sample, number: int) -> list[Coroutine]:
    """What generates the samples of one prompt: a call each, or one for all where the generate hook takes a list."""
    size = dataset_cfg.n_samples_per_eval_prompt
    group = [_eval_sample(dataset_cfg, prompt, number * size + j) for j in range(size)]
    path = dataset_cfg.custom_generate_function_path or args.custom_generate_function_path
    parts = [group] if uses_list_generate(path) else [[sample] for sample in group]
    return [_evaluate(args, dataset_cfg, part, takes_list=uses_list_generate(path)) for part in parts]


async def _evaluate(args, dataset_cfg, group: list[Sample], takes_list: bool) -> list:
    state = GenerateState(args)
    params = eval_sampling_params(args, dataset_cfg)
    if takes_list:
        results = await generation.generate_and_rm_group(args, group, params, evaluation=True)
    else:
        params = _seeded(args, dataset_cfg, group[0], params)
        results = [await generation.generate_and_rm(args, group[0], params, evaluation=True)]
    rewards = [logged_reward(leaf, args.eval_reward_key or args.reward_key) for leaf in leaves_of(results)]
    scored = [reward for reward in rewards if reward is not None]
    state.progress.add(
        "eval",
        len(group),
        tokens=sum(leaf.response_length for leaf in leaves_of(results)),
        reward_sum=sum(scored),
        rewards=len(scored),
    )
    return results


async def _gather_until_idle(calls: list[Coroutine], dataset_cfg) -> tuple[list, int]:
    """(results in order, number of calls given up): when fewer than `eval_early_stop_remaining` calls are left and none ends for
    `eval_early_stop_idle_timeout` seconds, the rest is cancelled; never before `min_eval_samples` have ended."""
    tasks = [asyncio.ensure_future(call) for call in calls]
    needed = dataset_cfg.min_eval_samples or 1
    pending = set(tasks)
    try:
        while pending:
            few = len(pending) < dataset_cfg.eval_early_stop_remaining and len(tasks) - len(pending) >= needed
            timeout = dataset_cfg.eval_early_stop_idle_timeout if few else None
            done, pending = await asyncio.wait(pending, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()  # raises what the call raised
            if not done:
                logger.warning("evaluation set %s: %d of %d given up: slow", dataset_cfg.name, len(pending), len(tasks))
                break
        return [task.result() for task in tasks if task not in pending], len(pending)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _seeded(args, dataset_cfg, sample: Sample, params: dict[str, Any]) -> dict[str, Any]:
    """A private copy with the sample's seed: the same in every round, so that evaluations compare."""
    params = copy.deepcopy(params)
    if uses_sampling_seeds(args):
        params["sampling_seed"] = sampling_seed(args, "eval", dataset_cfg.name, sample.index)
    return params


def eval_sampling_params(args, dataset_cfg) -> dict[str, Any]:
    """The `sampling_params` of an evaluation request."""
    skip_special = dataset_cfg.skip_special_tokens
    params = {
        "temperature": dataset_cfg.temperature,
        "top_p": dataset_cfg.top_p,
        "top_k": dataset_cfg.top_k,
        "max_new_tokens": dataset_cfg.max_response_len,
        "stop": dataset_cfg.stop,
        "stop_token_ids": dataset_cfg.stop_token_ids,
        "skip_special_tokens": args.rollout_skip_special_tokens if skip_special is None else skip_special,
        "no_stop_trim": dataset_cfg.no_stop_trim is not False,
    }
    for name in ("min_new_tokens", "repetition_penalty"):
        if getattr(dataset_cfg, name) is not None:
            params[name] = getattr(dataset_cfg, name)
    return params


def _eval_sample(dataset_cfg, prompt: Sample, index: int) -> Sample:
    sample = prompt.duplicate()
    sample.index, sample.session_id = index, str(uuid.uuid4())
    sample.group_index = index // dataset_cfg.n_samples_per_eval_prompt
    if dataset_cfg.rm_type:
        sample.metadata["rm_type"] = dataset_cfg.rm_type
    sample.metadata.update(copy.deepcopy(dataset_cfg.metadata_overrides or {}))
    sample.custom_rm_path = dataset_cfg.custom_rm_path
    sample.generate_function_path = dataset_cfg.custom_generate_function_path
    return sample


def _load_prompts(args, state: GenerateState, dataset_cfg) -> PromptSet:
    fmt = eval_row_format(args, dataset_cfg)
    key = repr((dataset_cfg.name, dataset_cfg.path, args.hf_checkpoint, fmt))
    if key not in _prompt_sets:
        try:
            prompts = PromptSet(dataset_cfg.path, fmt, state.tokenizer, state.processor, args.num_data_workers)
        except ValueError as error:
            raise ValueError(f"evaluation set {dataset_cfg.name}: {error}") from error
        count, least = len(prompts) * dataset_cfg.n_samples_per_eval_prompt, dataset_cfg.min_eval_samples
        if least is not None and count < least:
            raise ValueError(f"evaluation set {dataset_cfg.name}: {count} samples, min_eval_samples is {least}")
        _prompt_sets[key] = prompts
    return _prompt_sets[key]


def eval_row_format(args, dataset_cfg) -> RowFormat:
    """How rows of this evaluation set are read."""
    fmt = RowFormat(
        input_key=dataset_cfg.input_key,
        label_key=dataset_cfg.label_key,
        metadata_key=dataset_cfg.metadata_key,
        tool_key=dataset_cfg.tool_key,
        multimodal_keys=dataset_cfg.multimodal_keys,
        apply_chat_template=bool(dataset_cfg.apply_chat_template),
        apply_chat_template_kwargs=dataset_cfg.apply_chat_template_kwargs or {},
        max_prompt_len=args.eval_max_prompt_len,
        strict=args.strict_args,
    )
    path = dataset_cfg.custom_generate_function_path or args.custom_generate_function_path
    return replace(fmt, apply_chat_template=False) if uses_list_generate(path) else fmt
