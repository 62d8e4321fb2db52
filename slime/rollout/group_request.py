"""The fresh samples of one prompt in a single engine call.

Invariant: every sample comes out as if it had been asked for alone, with its own seed, id, log-probs and finish reason; only
the moment differs, since the call answers when the longest of them has ended. Samples that differ in what they ask for
(continued ones, media, routing keys) are not asked for together. Does not score, and knows no rounds.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import Any

from slime.observability.trace_utils import build_sglang_meta_trace_attrs, trace_span
from slime.rollout.engine_control import get_model_url
from slime.rollout.generate_state import GenerateState, num_engines, uses_sampling_seeds
from slime.rollout.request import (
    append_engine_output,
    build_request,
    mark_prompt_too_long,
    new_token_budget,
    prompt_ids,
    says_context_too_long,
)
from slime.rollout.round_end import FINISHED
from slime.utils.http_utils import HTTPStatusError, post
from slime.utils.sample_adapter import KEY as ADAPTER_KEY
from slime.utils.types import Sample

SHORT_RESPONSE = 512
"""Up to this many new tokens `--group-requests auto` waits for the whole group; beyond it rewards should start early."""


def asks_together(args, group: list, evaluation: bool) -> bool:
    """Whether one call can stand for the calls of this group's samples, and is wanted."""
    capacity = args.sglang_server_concurrency * num_engines(args)
    if evaluation or not 2 <= len(group) <= capacity or not is_wanted(args):
        return False
    first = group[0]
    return all(isinstance(sample, Sample) and _is_fresh(sample) for sample in group) and all(
        sample.index == first.index + position
        and sample.prompt == first.prompt
        and sample.apply_chat_template_kwargs == first.apply_chat_template_kwargs
        and sample.metadata.get("tools") == first.metadata.get("tools")
        and sample.metadata.get(ADAPTER_KEY) == first.metadata.get(ADAPTER_KEY)
        and sample.tokens == first.tokens
        for position, sample in enumerate(group)
    )


def is_wanted(args) -> bool:
    """Whether the run's settings let a call stand for several samples.

    Seeds of the answers of one call are those of single calls with the embedded engine only: SGLang gives all answers the
    same seed. Routing keys and routed experts belong to single samples.
    """
    if args.group_requests == "never" or args.custom_generate_function_path or args.use_rollout_routing_replay:
        return False
    if args.router_policy == "consistent_hashing":
        return False
    is_embedded = args.rollout_engine == "embedded"
    if uses_sampling_seeds(args) and not is_embedded:
        return False
    is_short = args.rollout_max_response_len is not None and args.rollout_max_response_len <= SHORT_RESPONSE
    return args.group_requests == "always" or (is_embedded and is_short)


def _is_fresh(sample: Sample) -> bool:
    return (
        sample.status not in FINISHED
        and sample.response_length == 0
        and sample.index is not None
        and sample.generate_function_path is None
        and not sample.multimodal_inputs
    )


async def generate_together(args, group: list[Sample], sampling_params: dict[str, Any]) -> None:
    """Fill in the responses of the group's samples; all are ABORTED when the round ended before it was their turn.

    Args:
        sampling_params: of the first sample; its seed counts up over the group.

    Raises: RuntimeError when no engine answered within the deadline.
    """
    state = GenerateState(args)
    async with _permits(state, len(group)):
        if state.aborted:
            for sample in group:
                sample.status = Sample.Status.ABORTED
            return
        tokens = group[0].tokens or prompt_ids(state, group[0])
        for sample in group:
            sample.tokens = list(tokens)
        budget = new_token_budget(args, group[0], sampling_params["max_new_tokens"])
        outputs = await _ask(args, group, {**sampling_params, "max_new_tokens": budget}) if budget > 0 else None
    if outputs is None:
        for sample in group:
            mark_prompt_too_long(args, state, sample, evaluation=False)
        return
    if len(outputs) != len(group):
        raise RuntimeError(f"the engine gave {len(outputs)} answers to a request for {len(group)}")
    for sample, output in zip(group, outputs, strict=True):
        append_engine_output(args, sample, output)


async def _ask(args, group: list[Sample], sampling_params: dict[str, Any]) -> list[dict] | None:
    """One answer per sample; None when the engine finds the prompt too long."""
    payload = build_request(args, group[0], {**sampling_params, "n": len(group)})
    with contextlib.ExitStack() as stack:
        spans = [stack.enter_context(trace_span(sample, "sglang_generate")) for sample in group]
        try:
            outputs = await post(get_model_url(args), payload)
        except HTTPStatusError as error:
            if says_context_too_long(error):
                return None
            raise
        for span, output in zip(spans, outputs, strict=False):
            span.update(build_sglang_meta_trace_attrs(output["meta_info"]) or {})
    return outputs


@contextlib.asynccontextmanager
async def _permits(state: GenerateState, count: int) -> AsyncIterator[None]:
    """`count` permits of the semaphore at once; groups take turns, or two could each hold half of the last ones."""
    held = 0
    try:
        async with state.group_turn:
            while held < count:
                await state.semaphore.acquire()
                held += 1
        yield
    finally:
        for _ in range(held):
            state.semaphore.release()
