"""Calling users' generate functions in both documented forms, and completing what they return.

Invariants: the sample's own prompt survives in-place edits; engine calls that the function made become the sample's
tokens; text without a record is encoded, flagged in `metadata["tokens_from_text"]` and never given log-probs.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from typing import Any

from slime.rollout.base_types import leaves_of
from slime.rollout.conversation import Recorder, owned_prompt, recording
from slime.rollout.generate_state import GenerateState
from slime.rollout.request import prompt_ids
from slime.utils.hook_forms import accepts_keyword
from slime.utils.types import Sample


async def call_sample_generate(
    args, function: Callable, sample: Sample, sampling_params: dict, evaluation: bool
) -> Any:
    """`function(args, sample, sampling_params[, evaluation])`; returns a Sample or a list of them."""
    keywords = {"evaluation": evaluation} if accepts_keyword(function, "evaluation") else {}
    prompt = copy.deepcopy(sample.prompt)
    recorder = Recorder(args, sampling_params, evaluation, owners=[sample.index])
    with recording(recorder):
        result = function(args, sample, sampling_params, **keywords)
        if inspect.isawaitable(result):
            result = await result
    _check_result(function, result)
    for leaf in leaves_of(result):
        leaf.prompt = prompt if leaf.prompt is sample.prompt else leaf.prompt
        complete_sample(args, leaf, recorder, 0)
    return result


async def call_list_generate(
    args, function: Callable, samples: list[Sample], sampling_params: dict, evaluation: bool
) -> list[Any]:
    """`function(args, samples, evaluation=False)` once for all samples; results are matched by order.

    Raises:
        ValueError: the hook returned another number of results.
    """
    prompts = [copy.deepcopy(sample.prompt) for sample in samples]
    for position, sample in enumerate(samples):
        if sample.response_length or sample.response:
            sample.reset_response()  # this form cannot continue a partial response
        sample.prompt = owned_prompt(copy.deepcopy(sample.prompt), position)
    recorder = Recorder(args, sampling_params, evaluation, owners=[sample.index for sample in samples])
    keywords = {"evaluation": evaluation} if accepts_keyword(function, "evaluation") else {}
    with recording(recorder):
        results = function(args, list(samples), **keywords)
        if inspect.isawaitable(results):
            results = await results
    if not isinstance(results, (list, tuple)) or len(results) != len(samples):
        found = f"{len(results)} results" if isinstance(results, (list, tuple)) else f"a {type(results).__name__}"
        raise ValueError(
            f"--custom-generate-function-path: {_name(function)} returned {found} for {len(samples)} samples"
        )
    recorder.attribute_rest()
    for position, result in enumerate(results):
        _check_result(function, result)
        samples[position].prompt = prompts[position]
        for leaf in leaves_of(result):
            leaf.prompt = prompts[position]
            complete_sample(args, leaf, recorder, position)
    return list(results)


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
    sample.check_invariants()


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


def _check_result(function: Callable, result: Any) -> None:
    wrong = [leaf for leaf in leaves_of(result) if not isinstance(leaf, Sample)]
    if wrong:
        raise TypeError(
            f"--custom-generate-function-path: {_name(function)} returned a {type(wrong[0]).__name__}, "
            "expected a Sample or a list of Samples"
        )


def _name(function: Callable) -> str:
    return getattr(function, "__qualname__", repr(function))
