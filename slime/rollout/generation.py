"""Generating and scoring one sample or the group of one prompt.

Invariants: tokens are those the engine reported, never text encoded again; a sample keeps its group and index whatever
a hook returns; an exception of one sample cancels and awaits its siblings and is raised. The semaphore bounds whole
samples, not requests. Does not know rounds, filters or buffers.
"""

from __future__ import annotations

import logging
import uuid
from typing import Any

from slime.observability.rollout_metrics import logged_reward
from slime.observability.trace_utils import build_sglang_meta_trace_attrs, trace_span
from slime.rollout.base_types import leaves_of
from slime.rollout.custom_generate import NO_SAMPLES, call_list_generate, call_sample_generate
from slime.rollout.engine_control import get_model_url
from slime.rollout.generate_state import GenerateState, round_seed, uses_sampling_seeds
from slime.rollout.group_request import asks_together, generate_together
from slime.rollout.request import (
    PROMPT_TOO_LONG,
    append_engine_output,
    check_engine_prompt,
    mark_prompt_too_long,
    next_request,
    request_headers,
    response_text,
    says_context_too_long,
    says_its_tokens,
)
from slime.rollout.round_end import FINISHED
from slime.rollout.sample_hooks import apply_sample_hooks
from slime.rollout.scoring import score_each, score_group, score_samples
from slime.utils.async_utils import gather_or_cancel
from slime.utils.hook_forms import generate_form
from slime.utils.http_utils import HTTPStatusError, post
from slime.utils.media_values import keeps_samples, settle_media
from slime.utils.misc import load_hook
from slime.utils.types import Sample

logger = logging.getLogger(__name__)

GENERATE_OPTION = "custom_generate_function_path"


async def generate(args, sample: Sample, sampling_params: dict[str, Any], evaluation: bool = False) -> Sample:
    """The built-in generator: one engine call that starts or continues the response.

    Raises:
        ValueError: the sample is finished. RuntimeError: no engine answered within the deadline.
    """
    if sample.status in FINISHED:
        raise ValueError(f"sample {sample.index} is {sample.status.value}; only unfinished samples can be generated")
    state = GenerateState(args)
    payload = next_request(args, state, sample, sampling_params, evaluation)
    if payload is None:
        return sample
    is_continued = sample.response_length > 0 and says_its_tokens(state, sample, sampling_params)
    with trace_span(sample, "sglang_generate") as span:
        try:
            output = await post(get_model_url(args), payload, headers=request_headers(args, sample))
        except HTTPStatusError as error:
            if says_context_too_long(error) and sample.response_length == 0:
                mark_prompt_too_long(args, state, sample, evaluation)
                return sample
            raise
        meta_info = output["meta_info"]
        check_engine_prompt(sample, meta_info)
        span.update(build_sglang_meta_trace_attrs(meta_info) or {})
    append_engine_output(args, sample, output)
    if is_continued:
        sample.response = response_text(state, sample, sampling_params)
    return sample


async def generate_and_rm(
    args, sample: Sample, sampling_params: dict[str, Any], evaluation: bool = False
) -> Sample | list[Sample]:
    """Generate one sample (or finish it), run the sample hooks and score it."""
    state = GenerateState(args)
    with trace_span(sample, "generate_and_rm"):
        _mask_earlier_tokens(args, sample)
        if sample.status in FINISHED:
            if not args.group_rm and not (state.aborted and not evaluation):
                await score_samples(args, [sample], evaluation)
            return sample
        async with state.semaphore:
            if state.aborted and not evaluation:
                sample.status = Sample.Status.ABORTED
                return sample
            path = sample.generate_function_path or args.custom_generate_function_path
            if path is None:
                result = await generate(args, sample, sampling_params, evaluation=evaluation)
            elif _is_list_form(path):
                result = (await call_list_generate(args, path, [sample], sampling_params, evaluation))[0]
            else:
                result = await call_sample_generate(args, path, sample, sampling_params, evaluation)
        return await _hooks_and_reward(args, sample, result, evaluation)


async def generate_and_rm_group(
    args, group: list[Sample], sampling_params: dict[str, Any], evaluation: bool = False
) -> list[Sample | list[Sample]]:
    """Generate and score all samples of one prompt."""
    state = GenerateState(args)
    if state.aborted and not evaluation:
        return group
    with trace_span(group, "generate_and_rm_group"):
        session = uuid.uuid4()
        for number, sample in enumerate(leaves_of(group)):
            if sample.session_id is None:
                sample.session_id = f"{session}-{number}"
        path = _list_form_path(args, group)
        if path is not None:
            results = await _generate_list_group(args, path, group, sampling_params, evaluation)
        elif asks_together(args, group, evaluation):
            results = await _generate_group_together(args, group, sampling_params)
        else:
            results = await gather_or_cancel(
                [
                    generate_and_rm(
                        args, item, sample_params(args, state, item, sampling_params, evaluation), evaluation
                    )
                    if isinstance(item, Sample)
                    else _rescore_split(args, item, evaluation)
                    for item in group
                ]
            )
        if args.group_rm and not evaluation and not state.aborted:
            await score_group_once(args, results)
    return results


async def score_group_once(args, results: list) -> None:
    """`--group-rm`: one batch call for the group, unless it came back scored or unfinished."""
    leaves = [leaf for leaf in leaves_of(results) if not _has_no_response(leaf)]
    unfinished = any(leaf.status == Sample.Status.ABORTED for leaf in leaves)
    if not unfinished and any(leaf.reward is None for leaf in leaves):
        await score_group(args, leaves)


def sample_params(
    args, state: GenerateState, sample: Sample, sampling_params: dict, evaluation: bool = False
) -> dict[str, Any]:
    """A private copy of the sampling parameters, with the sample's own seed in a training round."""
    params = dict(sampling_params)
    if not evaluation and uses_sampling_seeds(args):
        params["sampling_seed"] = round_seed(args, state.rollout_id, sample.index or 0, sample.response_length)
    return params


async def _generate_group_together(args, group: list[Sample], sampling_params: dict) -> list[Sample | list[Sample]]:
    """All samples of a prompt by one engine call, then each through hooks and reward."""
    state = GenerateState(args)
    with trace_span(group, "generate_and_rm"):
        params = sample_params(args, state, group[0], sampling_params, evaluation=False)
        await generate_together(args, group, params)
        if args.rollout_sample_hook_path:
            return await gather_or_cancel([_hooks_and_reward(args, sample, sample, False) for sample in group])
        if not args.group_rm:
            await score_each(args, [sample for sample in group if sample.status != Sample.Status.ABORTED])
        _count(args, state, group)
    return list(group)


def _mask_earlier_tokens(args, sample: Sample) -> None:
    if args.partial_rollout and args.mask_offpolicy_in_partial_rollout and sample.response_length > 0:
        sample.loss_mask = [0] * sample.response_length


async def _rescore_split(args, leaves: Any, evaluation: bool) -> Any:
    """A fan-out result that came back from the buffer: finished already, at most its reward is missing."""
    if not args.group_rm:
        await score_samples(args, leaves_of(leaves), evaluation)
    return leaves


async def _hooks_and_reward(args, sample: Sample, result: Any, evaluation: bool) -> Sample | list[Sample]:
    state = GenerateState(args)
    if not (isinstance(result, Sample) and _has_no_response(result)):
        result = await apply_sample_hooks(args, result, rollout_id=state.rollout_id, evaluation=evaluation)
    leaves = leaves_of(result)
    for leaf in leaves:
        _inherit_identity(leaf, sample)
        settle_media(leaf, keeps_samples(args), "generation")
    aborted = any(leaf.status == Sample.Status.ABORTED for leaf in leaves)
    if leaves and not aborted and not (args.group_rm and not evaluation):
        await score_samples(args, leaves, evaluation)
    if not evaluation:
        _count(args, state, leaves)
    return result


def _has_no_response(sample: Sample) -> bool:
    """Whether the sample only stands for what could not be made; a user's function may keep errors of its own under the name."""
    return sample.metadata.get("generate_error") in (NO_SAMPLES, PROMPT_TOO_LONG)


def _count(args, state: GenerateState, leaves: list[Sample]) -> None:
    """Tell the progress of what was generated and scored."""
    rewards = [logged_reward(leaf, args.reward_key) for leaf in leaves]
    scored = [reward for reward in rewards if reward is not None]
    state.progress.add(
        "generate",
        0,
        tokens=sum(leaf.response_length for leaf in leaves),
        reward_sum=sum(scored),
        rewards=len(scored),
    )


def _inherit_identity(leaf: Sample, origin: Sample) -> None:
    """A Sample that a hook made anew belongs to the prompt it was made for, and is scored as that one would be."""
    if leaf is origin:
        return
    for name in ("group_index", "index", "label", "custom_rm_path", "generate_function_path"):
        if getattr(leaf, name) is None:
            setattr(leaf, name, getattr(origin, name))
    if "rm_type" in (origin.metadata or {}):
        leaf.metadata = {"rm_type": origin.metadata["rm_type"], **(leaf.metadata or {})}
    if "data_row" not in vars(leaf) and "data_row" in vars(origin):
        leaf.data_row = origin.data_row


# ---- list-form hooks -----------------------------------------------------------------------------------------------


def _is_list_form(path: str) -> bool:
    return generate_form(load_hook(path, GENERATE_OPTION)) == "list"


def _list_form_path(args, group: list) -> str | None:
    """The generate hook of the group if it wants all its samples in one call."""
    paths = {leaf.generate_function_path or args.custom_generate_function_path for leaf in leaves_of(group)}
    path = paths.pop() if len(paths) == 1 else None
    return path if path is not None and _is_list_form(path) else None


async def _generate_list_group(args, path: str, group: list, sampling_params: dict, evaluation: bool) -> list:
    """One call of a list-form hook for the samples that are not finished yet."""
    state = GenerateState(args)
    todo = [item for item in group if isinstance(item, Sample) and item.status not in FINISHED]
    outputs: list = []
    if todo:
        async with state.semaphore:
            if state.aborted and not evaluation:
                for sample in todo:
                    sample.status = Sample.Status.ABORTED
                return group
            outputs = await call_list_generate(args, path, todo, sampling_params, evaluation)
    by_id = {id(sample): output for sample, output in zip(todo, outputs, strict=True)}
    return await gather_or_cancel(
        [
            _hooks_and_reward(args, item, by_id[id(item)], evaluation)
            if id(item) in by_id
            else _rescore_split(args, item, evaluation)
            for item in group
        ]
    )
