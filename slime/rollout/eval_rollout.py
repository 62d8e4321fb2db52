"""Evaluation: every held-out set, n samples per prompt, no filter and no buffer.

Invariants: results are in the order of the prompts; each sample has its own sampling parameters; a data set is read
once per process. Does not know metrics.
"""

from __future__ import annotations

import asyncio
import copy
import logging
from dataclasses import replace
from typing import Any

from slime.rollout import generation
from slime.rollout.base_types import RolloutFnEvalOutput, leaves_of
from slime.rollout.generate_state import GenerateState, sampling_seed, uses_sampling_seeds
from slime.rollout.prompt_format import uses_list_generate
from slime.utils.data import PromptSet, RowFormat
from slime.utils.types import Sample

logger = logging.getLogger(__name__)

_prompt_sets: dict[str, PromptSet] = {}


async def eval_rollout(args, rollout_id: int) -> RolloutFnEvalOutput:
    """Evaluate on all of `args.eval_datasets` at once."""
    if args.group_rm:
        raise ValueError("--group-rm is not supported in evaluation; give the data sets their own reward")
    state = GenerateState(args)
    state.counters["eval_reward_failed"] = 0
    state.progress.set_total("eval", None)
    results = await generation.gather_or_cancel(
        [eval_rollout_single_dataset(args, rollout_id, config) for config in args.eval_datasets]
    )
    data = {name: result for part in results for name, result in part.items()}
    num_failed = state.counters["eval_reward_failed"]
    if num_failed:
        logger.warning("evaluation at round %d: %d rewards failed and count as 0", rollout_id, num_failed)
    return RolloutFnEvalOutput(data=data, metrics={"eval/reward_failed": num_failed} if num_failed else {})


async def eval_rollout_single_dataset(args, rollout_id: int, dataset_cfg) -> dict[str, dict[str, Any]]:
    """`{name: {"rewards", "truncated", "samples"}}` of one data set."""
    state = GenerateState(args)
    prompts = await asyncio.to_thread(_load_prompts, args, state, dataset_cfg)
    calls, index = [], 0
    params = eval_sampling_params(args, dataset_cfg)
    for prompt in prompts.samples:
        group = [
            _eval_sample(args, dataset_cfg, prompt, index + j) for j in range(dataset_cfg.n_samples_per_eval_prompt)
        ]
        index += len(group)
        calls.append(_eval_group(args, dataset_cfg, group, params))
    results = await generation.gather_or_cancel(calls)
    samples = sorted(leaves_of(results), key=lambda sample: sample.index)
    key = args.eval_reward_key or args.reward_key
    return {
        dataset_cfg.name: {
            "rewards": [sample.reward[key] if key else sample.reward for sample in samples],
            "truncated": [sample.status == Sample.Status.TRUNCATED for sample in samples],
            "samples": samples,
        }
    }


async def _eval_group(args, dataset_cfg, group: list[Sample], params: dict[str, Any]) -> list:
    state = GenerateState(args)
    path = group[0].generate_function_path or args.custom_generate_function_path
    if uses_list_generate(path):
        results = await generation.generate_and_rm_group(args, group, dict(params), evaluation=True)
    else:
        results = await generation.gather_or_cancel(
            [
                generation.generate_and_rm(args, sample, _seeded(args, dataset_cfg, sample, params), evaluation=True)
                for sample in group
            ]
        )
    rewards = [leaf.reward for leaf in leaves_of(results) if isinstance(leaf.reward, (int, float))]
    state.progress.add(
        "eval",
        len(group),
        tokens=sum(leaf.response_length for leaf in leaves_of(results)),
        reward_sum=float(sum(rewards)),
        rewards=len(rewards),
    )
    return results


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


def _eval_sample(args, dataset_cfg, prompt: Sample, index: int) -> Sample:
    sample = copy.deepcopy(prompt)
    sample.index = index
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
        _prompt_sets[key] = PromptSet(dataset_cfg.path, fmt, state.tokenizer, state.processor, args.num_data_workers)
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
