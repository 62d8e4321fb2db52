"""Calling users' generate functions in both documented forms, and completing what they return.

Invariants: the sample's own prompt and group survive in-place edits; engine calls that the function made become the sample's
tokens; text without a record is encoded, flagged in `metadata["tokens_from_text"]` and never given log-probs; an execution that
gave no samples is one failed sample. Plain functions run in threads, so that they may block.
"""

from __future__ import annotations

import copy
from typing import Any

from slime.batching.sample_check import check_alignment
from slime.rollout.base_types import leaves_of
from slime.rollout.conversation import Recorder, RoundEnded, owned_prompt, recording
from slime.rollout.generate_state import GenerateState
from slime.rollout.request import prompt_ids
from slime.rollout.scoring import mark_reward_failed
from slime.utils.hook_calls import await_hook, wrong
from slime.utils.hook_forms import accepts_keyword
from slime.utils.misc import load_hook
from slime.utils.plain_data import with_shared_leaves
from slime.utils.provenance import name_source
from slime.utils.types import Sample

OPTION = "custom_generate_function_path"
NO_SAMPLES = "no_samples"


async def call_sample_generate(args, path: str, sample: Sample, sampling_params: dict, evaluation: bool) -> Any:
    """`function(args, sample, sampling_params[, evaluation])`; returns a Sample or a list of at least one.

    Raises:
        TypeError, ValueError: the hook returned something else. HookError: it raised.
    """
    prompt, group_index, index = with_shared_leaves(sample.prompt), sample.group_index, sample.index
    _begin(sample)
    recorder = Recorder(args, sampling_params, evaluation, owners=[sample])
    own_params = copy.deepcopy(sampling_params)
    if not args.sglang_enable_deterministic_inference:  # a seed that all requests of the function share is none
        own_params.pop("sampling_seed", None)
    try:
        with recording(recorder):
            result = await _call(args, path, evaluation, sample, own_params)
    except RoundEnded:
        sample.prompt, sample.index, sample.group_index = prompt, index, group_index
        return _cut_short(sample)
    _check_result(path, result, evaluation)
    sample.index = index
    if not leaves_of(result):
        sample.prompt, sample.group_index = prompt, group_index
        return _without_samples(args, path, sample, evaluation)
    if isinstance(result, Sample):
        result.index = index
    for leaf in leaves_of(result):
        leaf.prompt = prompt if leaf.prompt is sample.prompt else leaf.prompt
        leaf.group_index = group_index
        _complete(args, path, leaf, recorder, 0)
    return result


async def _call(args, path: str, evaluation: bool, *arguments: Any) -> Any:
    keywords = {"evaluation": evaluation} if accepts_keyword(load_hook(path, OPTION), "evaluation") else {}
    return await await_hook(path, OPTION, args, *arguments, in_thread=True, **keywords)


async def call_list_generate(
    args, path: str, samples: list[Sample], sampling_params: dict, evaluation: bool
) -> list[Any]:
    """`function(args, samples, evaluation=False)` once for all samples; results are matched by order.

    Raises:
        TypeError, ValueError: the hook returned something else. HookError: it raised.
    """
    group_index, indices = samples[0].group_index, [sample.index for sample in samples]
    prompts = [with_shared_leaves(sample.prompt) for sample in samples]
    for position, sample in enumerate(samples):
        if sample.response_length or sample.response:
            sample.reset_response()  # this form cannot continue a partial response
        _begin(sample)
        sample.prompt = owned_prompt(with_shared_leaves(sample.prompt), position)
    recorder = Recorder(args, sampling_params, evaluation, owners=samples)
    try:
        with recording(recorder):
            results = await _call(args, path, evaluation, list(samples))
        _check_results(path, results, len(samples))
        recorder.attribute_rest()
    except RoundEnded:
        results = None
    for sample, prompt, index in zip(samples, prompts, indices, strict=True):
        sample.prompt, sample.index, sample.group_index = prompt, index, group_index
    if results is None:
        return [_cut_short(sample) for sample in samples]
    returned = {id(leaf) for leaf in leaves_of(list(results))}
    spare = [sample for sample in samples if id(sample) not in returned]
    position_of = {id(sample): position for position, sample in enumerate(samples)}  # results may come in another order
    completed = []
    for position, result in enumerate(results):
        _check_result(path, result, evaluation)
        if not leaves_of(result):
            own = spare.pop(0) if spare else samples[position].duplicate()
            completed.append(_without_samples(args, path, own, evaluation))
            continue
        if isinstance(result, Sample) and id(result) not in position_of:
            result.index = indices[position]
        for leaf in leaves_of(result):
            leaf.prompt, leaf.group_index = prompts[position], group_index
            _complete(args, path, leaf, recorder, position_of.get(id(leaf), position))
        completed.append(result)
    return completed


def _begin(sample: Sample) -> None:
    """How an earlier round left the sample says nothing of this one: functions that set no status would never end it."""
    if sample.status == Sample.Status.ABORTED:
        sample.status = Sample.Status.PENDING


def _cut_short(sample: Sample) -> Sample:
    """The sample, to be executed again."""
    sample.reset_response()
    sample.rollout_id, sample.status = None, Sample.Status.ABORTED
    return sample


def _without_samples(args, path: str, sample: Sample, evaluation: bool) -> Sample:
    """What stands for an execution of `sample` that gave no samples: it, failed, with its prompt's tokens alone.

    One that the end of the round has cut short is ABORTED, to be executed again.
    """
    state = GenerateState(args)
    _cut_short(sample)
    if state.aborted and not evaluation:
        return sample
    sample.tokens = prompt_ids(state, sample)
    error = ValueError(f"--custom-generate-function-path {path} returned no samples")
    mark_reward_failed(args, [sample], error, evaluation, what="generation")
    sample.metadata["generate_error"] = NO_SAMPLES
    return sample


def _complete(args, path: str, sample: Sample, recorder: Recorder, position: int) -> None:
    sample.make_plain()
    complete_sample(args, sample, recorder, position)
    name_source(sample, path)
    try:
        check_alignment(sample)
    except ValueError as error:
        raise wrong(OPTION, path, f"made a sample whose lists do not fit: {error}") from error


def complete_sample(args, sample: Sample, recorder: Recorder, position: int) -> None:
    """Give a sample that carries only text its tokens, mask, length and status."""
    state = GenerateState(args)
    if sample.response_length == 0 and sample.status != Sample.Status.ABORTED:
        if recorder.has_calls(position):
            recorder.fill(sample, position)
        elif sample.response and not sample.loss_mask:
            if not recorder.fill_from_posts(sample):
                _encode_response(state, sample)
        elif not sample.tokens:
            sample.tokens = prompt_ids(state, sample)
    if sample.status == Sample.Status.PENDING:
        sample.status = Sample.Status.COMPLETED


def _encode_response(state: GenerateState, sample: Sample) -> None:
    """Tokens of a response that no engine call recorded: trained, but without log-probs."""
    if not sample.tokens:
        sample.tokens = prompt_ids(state, sample)
    ids = state.tokenizer.encode(sample.response, add_special_tokens=False)
    sample.tokens = list(sample.tokens) + ids
    sample.response_length = len(ids)
    sample.loss_mask = [1] * len(ids)
    sample.metadata["tokens_from_text"] = len(ids)
    state.counters["text_only_samples"] += 1


def _check_results(path: str, results: Any, count: int) -> None:
    if not isinstance(results, (list, tuple)) or len(results) != count:
        found = f"{len(results)} results" if isinstance(results, (list, tuple)) else f"a {type(results).__name__}"
        raise wrong(OPTION, path, f"returned {found} for {count} samples")
    if len({id(leaf) for leaf in leaves_of(list(results))}) < len(leaves_of(list(results))):
        raise wrong(OPTION, path, "returned a sample twice")


def _check_result(path: str, result: Any, evaluation: bool) -> None:
    leaves = leaves_of(result)
    others = [leaf for leaf in leaves if not isinstance(leaf, Sample)]
    if others:
        raise TypeError(str(wrong(OPTION, path, f"returned a {type(others[0]).__name__}")))
    ids = {leaf.rollout_id for leaf in leaves}
    if len(leaves) > 1 and not evaluation and (None in ids or len(ids) > 1):
        raise wrong(
            OPTION,
            path,
            f"returned {len(leaves)} samples of one execution with rollout_id {sorted(map(str, ids))}; all have to carry the same "
            "one, for example sample.index of the sample that they were made from",
        )
