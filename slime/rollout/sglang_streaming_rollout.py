"""A generator that streams: after an abort the text so far is already on the sample.

`--custom-generate-function-path slime.rollout.sglang_streaming_rollout.generate_streaming`. Invariants: whatever the
server sends, incremental or cumulative chunks, tokens are appended once and in order; there is no retry. Ends like
`generate`. Does not know the round.
"""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncIterator
from typing import Any

from slime.observability.trace_utils import trace_span
from slime.rollout.engine_control import get_model_url
from slime.rollout.generate_state import GenerateState
from slime.rollout.request import (
    append_engine_output,
    check_engine_prompt,
    mark_prompt_too_long,
    next_request,
    request_headers,
    response_text,
    says_context_too_long,
    says_its_tokens,
)
from slime.utils.http_utils import HTTPStatusError, get_session, prepared
from slime.utils.meta_info import TOP_P_KEYS, int32_tensor
from slime.utils.types import Sample

logger = logging.getLogger(__name__)


async def generate_streaming(args, sample: Sample, sampling_params: dict[str, Any], evaluation: bool = False) -> Sample:
    """Start or continue the response of one sample, chunk by chunk."""
    state = GenerateState(args)
    payload = next_request(args, state, sample, sampling_params, evaluation)
    if payload is None:
        return sample
    payload["stream"] = True
    is_continued, is_plain = sample.response_length > 0, says_its_tokens(state, sample, sampling_params)
    try:
        with trace_span(sample, "sglang_generate_stream"):
            finished = await _append_stream(args, state, sample, payload, evaluation)
    except HTTPStatusError as error:
        if not says_context_too_long(error) or sample.response_length > 0:
            raise
        mark_prompt_too_long(args, state, sample, evaluation)
        return sample
    if not finished:
        sample.status = Sample.Status.ABORTED
    if is_plain and (is_continued or not finished):  # a stream holds back the text of half a character
        sample.response = response_text(state, sample, sampling_params)
    return sample


async def _append_stream(args, state: GenerateState, sample: Sample, payload: dict, evaluation: bool) -> bool:
    """Append the answer as it comes, until it ends or the round does. Returns whether the engine ended it."""
    merger, finished, earlier = ChunkMerger(), False, sample.response
    chunks = _chunks(get_model_url(args), payload, request_headers(args, sample))
    try:
        async for chunk in chunks:
            if merger.num_tokens == 0:
                check_engine_prompt(sample, chunk["meta_info"])
            fresh = merger.fresh_part(chunk)
            finished = bool(chunk["meta_info"].get("finish_reason"))
            append_engine_output(args, sample, fresh, update_terminal_info=finished)
            sample.response = earlier + merger.text
            if finished or (state.aborted and not evaluation):
                break
    finally:
        await chunks.aclose()
    return finished


class ChunkMerger:
    """Turns chunks of either kind into the tokens that each adds, and `text`: all so far. An engine may take back text, when it ends
    in a stop string that is cut off.

    Cumulative: every chunk repeats all tokens so far. Incremental: only new ones. Told apart by `completion_tokens`,
    which counts all tokens so far in both, against the number of log-probs in the chunk.
    """

    def __init__(self) -> None:
        self.num_tokens = 0
        self.text = ""

    def fresh_part(self, chunk: dict[str, Any]) -> dict[str, Any]:
        meta_info = chunk["meta_info"]
        triples = meta_info.get("output_token_logprobs") or []
        total = meta_info.get("completion_tokens")
        cumulative = len(triples) > 0 and (total is None or len(triples) == total) and len(triples) >= self.num_tokens
        fresh = triples[self.num_tokens :] if cumulative else triples
        text = chunk.get("text") or ""
        repeats = cumulative or (not triples and text.startswith(self.text))
        self.text = text if repeats else self.text + text
        skipped = self.num_tokens if cumulative else 0
        fresh_meta = {**meta_info, "output_token_logprobs": fresh, **self._shifted_versions(meta_info)}
        fresh_meta |= _without_leading_tokens(meta_info, skipped)
        self.num_tokens += len(fresh)
        return {"meta_info": fresh_meta}

    def _shifted_versions(self, meta_info: dict[str, Any]) -> dict[str, Any]:
        """Version spans count from the first token of the call; the sample wants them from the chunk's."""
        spans = meta_info.get("weight_versions")
        if not spans:
            return {}
        shift = self.num_tokens
        return {"weight_versions": [{**s, "start": s["start"] - shift, "end": s["end"] - shift} for s in spans]}


def _without_leading_tokens(meta_info: dict[str, Any], skipped: int) -> dict[str, Any]:
    """Top-p replay data of a cumulative chunk, its first `skipped` tokens cut off."""
    for ids_key, offsets_key in TOP_P_KEYS:
        if skipped and meta_info.get(ids_key) is not None and meta_info.get(offsets_key) is not None:
            ids, offsets = int32_tensor(meta_info[ids_key]), int32_tensor(meta_info[offsets_key])[skipped:]
            return {ids_key: ids[int(offsets[0]) :], offsets_key: offsets - offsets[0]}
    return {}


async def _chunks(url: str, payload: dict[str, Any], headers: dict | None) -> AsyncIterator[dict[str, Any]]:
    """The JSON events of a server-sent stream up to `[DONE]`; what is no JSON is skipped with a warning."""
    async with get_session().post(url, json=prepared(url, payload), headers=headers) as response:
        if response.status >= 400:
            raise HTTPStatusError("POST", url, response.status, await response.text())
        async for raw in response.content:
            line = raw.decode("utf-8", errors="replace").strip()
            if not line.startswith("data:"):
                continue
            data = line.removeprefix("data:").strip()
            if data == "[DONE]":
                return
            try:
                chunk = json.loads(data)
            except ValueError:
                logger.warning("skipped a chunk that is not JSON: %.200s", data)
                continue
            if not isinstance(chunk, dict) or "meta_info" not in chunk:
                raise RuntimeError(f"POST {url}: the stream says {data:.500}")
            yield chunk
