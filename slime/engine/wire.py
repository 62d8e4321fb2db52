"""JSON of /generate: from a request body to Requests, from finished Requests to replies.

Invariant: whatever a client sends, `parse_generate` either returns valid Requests or raises ValueError (answered with 400);
keys that are not known here are ignored at the top level, as SGLang does. Knows no sockets and no threads.
"""

from __future__ import annotations

import base64
import itertools
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from slime.engine import sampler
from slime.engine.requests import NO_INPUT_LOGPROBS, Chunk, Request
from slime.engine.sampling_params import SamplingParams, parse_sampling_params
from slime.engine.tokenizer import EngineTokenizer, TextStream

MEDIA_FIELDS = ("image_data", "video_data", "audio_data")


@dataclass
class Limits:
    """What a request is checked against."""

    vocab_size: int
    context_length: int
    eos_token_ids: tuple[int, ...]
    random_seed: int
    keeps_experts: bool = False


@dataclass
class GenerateCall:
    """One HTTP call: its requests and the shape of the reply."""

    requests: list[Request]
    is_list: bool
    stream: bool
    text_in_logprobs: bool
    n: int = 1
    """Answers per prompt."""


class CallParser:
    """Turn bodies of /generate into GenerateCalls."""

    def __init__(self, limits: Limits, tokenizer: EngineTokenizer, require_adapter: Callable[[str], None]):
        self._limits, self._tokenizer, self._require_adapter = limits, tokenizer, require_adapter
        self._arrivals = itertools.count()
        self._names, self._name_prefix = itertools.count(), os.urandom(8).hex()

    def parse(self, body: Any) -> GenerateCall:
        """Raises: ValueError saying which key is wrong."""
        if not isinstance(body, dict):
            raise ValueError(f"the body must be a JSON object, got {type(body).__name__}")
        media = [name for name in MEDIA_FIELDS if body.get(name)]
        if media:
            raise ValueError(f"{media[0]}: this engine serves models that read text only")
        prompts, is_batch = self._prompts(body)
        count = len(prompts)
        params = self._per_prompt(body, "sampling_params", count, is_batch)
        rids = self._per_prompt(body, "rid", count, is_batch, spread_single=False)
        options = {
            name: self._per_prompt(body, name, count, is_batch)
            for name in ("return_logprob", "logprob_start_len", "top_logprobs_num", "return_routed_experts")
        }
        options["lora_path"] = self._adapters(body, count, is_batch)
        options["token_ids_logprob"] = self._token_ids(body.get("token_ids_logprob"), count, is_batch)
        stream = body.get("stream") is True
        requests: list[Request] = []
        for i, ids in enumerate(prompts):
            checked = parse_sampling_params(params[i], self._limits.vocab_size)
            own = {name: values[i] for name, values in options.items()}
            requests += self._requests(ids, checked, rids[i], own, stream)
        with_text = body.get("return_text_in_logprobs") is True
        return GenerateCall(requests, is_batch or len(requests) > count, stream, with_text, len(requests) // count)

    def _adapters(self, body: dict, count: int, is_batch: bool) -> list[str | None]:
        """Return the name of each prompt's adapter, None for the base model."""
        names = self._per_prompt(body, "lora_path", count, is_batch)
        for name in set(map(str, filter(None, names))):
            self._require_adapter(name)
        return [name or None for name in names]

    def room_for(self, ids: list[int]) -> int:
        """Return how many tokens may follow a prompt.

        Raises: ValueError when it is too long by itself.
        """
        room = self._limits.context_length - len(ids) - 1
        if room < 1:
            raise ValueError(f"a prompt of {len(ids)} tokens does not fit the context {self._limits.context_length}")
        return room

    def _token_ids(self, value: Any, count: int, is_batch: bool) -> list[list[int]]:
        """Return the ids whose log-probs each prompt asks for; one list serves all prompts."""
        shared = not (isinstance(value, list) and value and isinstance(value[0], list))
        lists = [value] * count if shared else value
        if len(lists) != count or not (shared or is_batch):
            raise ValueError(f"token_ids_logprob has {len(lists)} lists for {count} prompt(s)")
        for ids in lists:
            size = self._limits.vocab_size
            if ids is not None and not (isinstance(ids, list) and all(type(i) is int and 0 <= i < size for i in ids)):
                raise ValueError(f"token_ids_logprob must hold token ids below {size}, got {ids!r}")
        return [ids or [] for ids in lists]

    def _prompts(self, body: dict) -> tuple[list[list[int]], bool]:
        ids, text = body.get("input_ids"), body.get("text")
        if (ids is None) == (text is None):
            raise ValueError("exactly one of input_ids and text is required")
        if text is not None:
            texts = text if isinstance(text, list) else [text]
            if not texts or not all(isinstance(t, str) for t in texts):
                raise ValueError("text must be a string or a non-empty list of strings")
            return [self._checked_ids(self._tokenizer.encode(t)) for t in texts], isinstance(text, list)
        if not isinstance(ids, list):
            raise ValueError("input_ids must be a list of integers or a list of such lists")
        is_batch = bool(ids) and isinstance(ids[0], list)
        return [self._checked_ids(one) for one in (ids if is_batch else [ids])], is_batch

    def _checked_ids(self, ids: Any) -> list[int]:
        if not isinstance(ids, list) or not ids:
            raise ValueError("a prompt must have at least one token")
        if not all(type(i) is int for i in ids):
            raise ValueError("input_ids must hold integers only")
        low, high = min(ids), max(ids)
        if low < 0 or high >= self._limits.vocab_size:
            bad = low if low < 0 else high
            raise ValueError(f"token id {bad} is outside the vocabulary of {self._limits.vocab_size}")
        return ids

    @staticmethod
    def _per_prompt(body: dict, name: str, count: int, is_batch: bool, spread_single: bool = True) -> list[Any]:
        value = body.get(name)
        if isinstance(value, list):
            if not is_batch or len(value) != count:
                raise ValueError(f"{name} is a list of {len(value)} for {count} prompt(s)")
            return value
        if is_batch and not spread_single and value is not None:
            return [f"{value}_{i}" for i in range(count)]
        return [value] * count

    def _wants_experts(self, value: Any) -> bool:
        if value is True and not self._limits.keeps_experts:
            raise ValueError(
                "return_routed_experts needs a mixture-of-experts model and a server started with "
                "--enable-return-routed-experts"
            )
        return value is True

    def _requests(self, ids: list[int], params: SamplingParams, rid: Any, own: dict, stream: bool) -> list[Request]:
        """Return the requests of one prompt, one per answer."""
        start, top = self._checked_options(ids, params, rid, own)
        stop_ids = set(params.stop_token_ids) | (set() if params.ignore_eos else set(self._limits.eos_token_ids))
        shared = {
            "parent_rid": rid,
            "prompt_ids": ids,
            "params": params if params.n == 1 else replace(params, n=1),
            "stop_ids": tuple(sorted(stop_ids)),
            "return_logprob": own["return_logprob"] is True,
            "logprob_start_len": start,
            "top_logprobs_num": top,
            "logprob_token_ids": tuple(own["token_ids_logprob"]),
            "stream": stream,
            "return_routed_experts": self._wants_experts(own["return_routed_experts"]),
            "lora_name": own["lora_path"],
        }
        identity = rid if rid is not None else next(self._arrivals)
        requests = []
        for i in range(params.n):
            own_rid = rid if rid is not None and params.n == 1 else f"{self._name_prefix}{next(self._names):016x}"
            requests.append(Request(rid=own_rid, seed=self._seed(params, identity, i), **shared))
        return requests

    def _checked_options(self, ids: list[int], params: SamplingParams, rid: Any, own: dict) -> tuple[int, int]:
        """Return (first prompt token to score, number of top log-probs)."""
        limit, total = self._limits.context_length, len(ids) + params.max_new_tokens
        if total > limit:
            raise ValueError(
                f"prompt of {len(ids)} tokens + max_new_tokens {params.max_new_tokens} = {total} is longer than the "
                f"model's context length of {limit}"
            )
        if rid is not None and not isinstance(rid, str):
            raise ValueError(f"rid must be a string, got {rid!r}")
        start = own["logprob_start_len"]
        start = NO_INPUT_LOGPROBS if start is None else start
        if type(start) is not int or not NO_INPUT_LOGPROBS <= start <= len(ids):
            raise ValueError(f"logprob_start_len {start!r} must be -1 or an index into the {len(ids)} prompt tokens")
        top = own["top_logprobs_num"] or 0
        if type(top) is not int or top < 0:
            raise ValueError(f"top_logprobs_num must be an integer not below 0, got {top!r}")
        return NO_INPUT_LOGPROBS if start == len(ids) else start, top

    def _seed(self, params: SamplingParams, identity: Any, i: int) -> int:
        """Return the seed of answer i; with a given one they are those of n requests whose seeds count up."""
        if params.sampling_seed is not None:
            return sampler.seed_of("sampling_seed", params.sampling_seed + i, 0)
        return sampler.seed_of("engine", self._limits.random_seed, identity, i)


class ReplyWriter:
    """Turn finished or advancing Requests into reply objects."""

    def __init__(self, tokenizer: EngineTokenizer):
        self._tokenizer = tokenizer

    def text_stream(self, request: Request) -> TextStream:
        """Return a fresh TextStream for a streaming request."""
        return TextStream(self._tokenizer, request.params)

    def reply(self, request: Request, text_in_logprobs: bool) -> dict[str, Any]:
        """Return the whole answer of a finished request."""
        meta = self._meta(request, 0, text_in_logprobs)
        return {"text": request.text, "output_ids": request.output_ids, "meta_info": meta}

    def piece(
        self,
        request: Request,
        chunk: Chunk,
        first: int,
        ids: list[int],
        logprobs: list[float],
        text: str,
        text_in_logprobs: bool,
    ) -> dict[str, Any]:
        """Return a piece of a stream that shows the output tokens `ids`, which begin at token `first`."""
        meta: dict[str, Any] = {
            "id": request.rid,
            "finish_reason": None,
            "prompt_tokens": len(request.prompt_ids),
            "weight_version": chunk.weight_version,
            "num_retractions": request.num_retractions,
            "reasoning_tokens": 0,
            "completion_tokens": chunk.num_output,
            "cached_tokens": request.cached_tokens,
            "cached_tokens_details": request.cached_details,
            "dp_rank": None,
        }
        if chunk.num_output == len(chunk.token_ids):
            meta["response_sent_to_client_ts"] = time.time()
        if request.return_logprob:
            meta.update(self._logprobs(request, first, ids, logprobs, text_in_logprobs))
        meta.update(_kept_ids(request, first, len(ids)))
        return {"text": text, "output_ids": ids, "meta_info": meta}

    def last_piece(
        self, request: Request, num_sent: int, text: str, text_in_logprobs: bool, was_begun: bool
    ) -> dict[str, Any]:
        """Return the piece that ends a stream, with the output tokens from `num_sent` on."""
        meta = self._meta(request, num_sent, text_in_logprobs)
        if was_begun:
            del meta["response_sent_to_client_ts"]  # said by the first piece
        return {"text": text, "output_ids": request.output_ids[num_sent:], "meta_info": meta}

    def _meta(self, request: Request, first: int, with_text: bool) -> dict[str, Any]:
        """Return meta_info of an ended request, with log-probs from output token `first` on."""
        duration = request.finished_at - request.received_at
        queue_time = (request.started_at or request.finished_at) - request.received_at
        run_time = max(request.finished_at - (request.started_at or request.finished_at), 1e-9)
        meta = {
            "id": request.rid,
            "finish_reason": request.finish_reason,
            "prompt_tokens": len(request.prompt_ids),
            "weight_version": request.weight_version,
            "weight_versions": request.version_spans(),
            "num_retractions": request.num_retractions,
            "reasoning_tokens": 0,
            "completion_tokens": len(request.output_ids),
            "cached_tokens": request.cached_tokens,
            "cached_tokens_details": request.cached_details,
            "dp_rank": None,
            "e2e_latency": duration,
            "queue_time": queue_time,
            "decode_throughput": len(request.output_ids) / run_time,
            "response_sent_to_client_ts": time.time(),
        }
        if request.return_logprob:
            ids, logprobs = request.output_ids[first:], request.output_logprobs[first:]
            meta.update(self._logprobs(request, first, ids, logprobs, with_text))
        meta.update(_kept_ids(request, first, len(request.output_ids) - first))
        if request.routed_experts is not None:
            meta["routed_experts"] = _base64_of(request.routed_experts)
        return meta

    def _logprobs(self, request: Request, first: int, ids: list, logprobs: list, with_text: bool) -> dict[str, Any]:
        scored = request.prompt_ids[request.logprob_start_len :] if request.needs_input_logprobs else []
        entries = {
            "input_token_logprobs": self._triples(
                request.input_logprobs, scored[: len(request.input_logprobs)], with_text
            ),
            "output_token_logprobs": self._triples(logprobs, ids, with_text),
            "output_token_logprobs_length": len(ids),
        }
        for asked, name, inputs, outputs in (
            (request.top_logprobs_num, "top_logprobs", request.input_top, request.output_top),
            (request.logprob_token_ids, "token_ids_logprobs", request.input_chosen, request.output_chosen),
        ):
            if asked:
                entries[f"input_{name}"] = [self._pairs(line, with_text) for line in inputs]
                recent = outputs[first : first + len(ids)]
                entries[f"output_{name}"] = [self._pairs(line, with_text) for line in recent]
        return entries

    def _triples(self, logprobs: list, ids: list[int], with_text: bool) -> list[list]:
        if with_text:
            texts = self._tokenizer.decode_batch([[i] for i in ids], False)
            return [list(entry) for entry in zip(logprobs, ids, texts, strict=True)]
        return [[logprob, i, None] for logprob, i in zip(logprobs, ids, strict=True)]

    def _pairs(self, line: list | None, with_text: bool) -> list[list] | None:
        if line is None:
            return None
        return self._triples([logprob for logprob, _ in line], [i for _, i in line], with_text)


def _kept_ids(request: Request, first: int, count: int) -> dict[str, str]:
    """Return the ids that the filters kept at output tokens first..first+count-1, flat, and where each token's begin."""
    if not request.params.returns_kept_ids:
        return {}
    kept = request.output_kept[first : first + count]
    offsets = np.cumsum([0, *map(len, kept)])
    ids = np.concatenate(kept) if kept else np.zeros(0)
    return {"top_p_token_ids": _base64_of(ids), "top_p_token_offsets": _base64_of(offsets)}


def _base64_of(numbers: np.ndarray) -> str:
    return base64.b64encode(numbers.astype("<i4").tobytes()).decode()
