"""Replies of /v1/completions and /v1/chat/completions, whole and in pieces.

The keys are those of SGLang's replies, a superset of OpenAI's. Invariant: the pieces of a stream join to the whole reply.
Knows no sockets.
"""

from __future__ import annotations

import time
from typing import Any

from slime.engine.openai_requests import OpenAiCall
from slime.engine.requests import Chunk, Request
from slime.engine.tokenizer import EngineTokenizer, TextStream

_NO_OFFSET = -1
"""text_offset of completions is not computed, which SGLang says by this number."""


class OpenAiWriter:
    """Formats what both whole replies and pieces consist of."""

    def __init__(self, tokenizer: EngineTokenizer):
        self._tokenizer = tokenizer

    def reply(self, call: OpenAiCall) -> dict[str, Any]:
        """Return the answer of a call whose requests have all ended."""
        requests = call.generate.requests
        choices = [self._choice(call, index, request) for index, request in enumerate(requests)]
        first = requests[0]
        return {
            "id": first.rid,
            "object": "chat.completion" if call.is_chat else "text_completion",
            "created": int(time.time()),
            "model": call.model,
            "choices": choices,
            "usage": usage(requests[:: call.n], requests),
            "metadata": {"weight_version": first.weight_version, "weight_versions": first.version_spans()},
        }

    def text_stream(self, request: Request) -> TextStream:
        return TextStream(self._tokenizer, request.params)

    def logprobs(self, call: OpenAiCall, request: Request, first: int, ids: list[int], values: list[float]) -> Any:
        """Return the `logprobs` of output tokens first..first+len(ids)-1; of the whole call's form."""
        if not call.with_logprobs or not ids:
            return None
        top = request.output_top[first : first + len(ids)] if request.top_logprobs_num else []
        if call.is_chat:
            texts = self._texts(ids)
            content = [self._entry(text, i, value) for text, i, value in zip(texts, ids, values, strict=True)]
            for n, entry in enumerate(content):
                entry["top_logprobs"] = self._top_entries(top[n]) if top else []
            return {"content": content}
        table = {"text_offset": [], "token_logprobs": [], "tokens": [], "top_logprobs": []}
        if call.echoes and request.needs_input_logprobs and first == 0:
            self._extend(table, request.prompt_ids, request.input_logprobs, request.input_top)
        self._extend(table, ids, values, top)
        return table

    def _choice(self, call: OpenAiCall, index: int, request: Request) -> dict[str, Any]:
        logprobs = self.logprobs(call, request, 0, request.output_ids, request.output_logprobs)
        if call.is_chat:
            message = {"role": "assistant", "content": request.text, "reasoning_content": None}
            answer: dict[str, Any] = {"message": message}
        else:
            answer = {"text": echo(call, index) + request.text}
        return {"index": index, **answer, "logprobs": logprobs, **ending(request)}

    def _extend(self, table: dict[str, list], ids: list[int], values: list, top: list) -> None:
        table["tokens"] += self._lossless_texts(ids)
        table["token_logprobs"] += values
        table["text_offset"] += [_NO_OFFSET] * len(ids)
        for line in top:
            names = self._lossless_texts([i for _, i in line or []])
            table["top_logprobs"].append(
                None if line is None else dict(zip(names, (value for value, _ in line), strict=True))
            )

    def _top_entries(self, line: list[tuple[float, int]]) -> list[dict[str, Any]]:
        texts = self._texts([i for _, i in line])
        return [self._entry(text, i, value) for text, (value, i) in zip(texts, line, strict=True)]

    def _entry(self, text: str, token: int, value: float) -> dict[str, Any]:
        raw = self._tokenizer.token_bytes(token)
        return {"token": text, "bytes": list(text.encode() if raw is None else raw), "logprob": value}

    def _texts(self, ids: list[int]) -> list[str]:
        return self._tokenizer.decode_batch([[i] for i in ids], False)

    def _lossless_texts(self, ids: list[int]) -> list[str]:
        """Texts of tokens; one that is only a part of a character stands as its bytes in Latin-1."""
        return [self._tokenizer.lossless(i, text) for i, text in zip(ids, self._texts(ids), strict=True)]


class OpenAiPieces:
    """Pieces of a streaming call."""

    def __init__(self, writer: OpenAiWriter, call: OpenAiCall):
        self._writer, self._call, self._created = writer, call, int(time.time())
        requests = call.generate.requests
        self._index = {id(request): i for i, request in enumerate(requests)}
        self._texts = [writer.text_stream(request) for request in requests]
        self._num_sent = [0] * len(requests)
        self._opened = [False] * len(requests)
        self._endings: list[tuple[int, Request]] = []

    def of(self, request: Request, chunk: Chunk | None) -> list[dict[str, Any]]:
        index = self._index[id(request)]
        if request.error is not None:
            return [{"error": error_body(request.error, 400 if request.is_client_error else 500)}]
        first = self._num_sent[index]
        if chunk is None:
            ids, values = request.output_ids[first:], request.output_logprobs[first:]
            text = self._texts[index].finish(request.text)
        else:
            ids, values, text = chunk.token_ids, chunk.logprobs, self._texts[index].push(chunk.token_ids)
        logprobs = self._writer.logprobs(self._call, request, first, ids, values)
        self._num_sent[index] += len(ids)
        make = self._chat if self._call.is_chat else self._completion
        return make(index, request, text, logprobs, chunk is None)

    def closing(self) -> list[dict[str, Any]]:
        """The ends of chat answers, and the usage when asked for."""
        objects = []
        for index, request in self._endings:
            objects.append(self._object(request, [_chat_choice(index, {}, None, **ending(request))]))
        if self._call.include_usage:
            requests = self._call.generate.requests
            objects.append({**self._object(requests[0], []), "usage": usage(requests[:: self._call.n], requests)})
        return objects

    def _completion(self, index: int, request: Request, text: str, logprobs: Any, ended: bool) -> list[dict[str, Any]]:
        before = "" if self._opened[index] else echo(self._call, index)
        self._opened[index] = True
        end = ending(request) if ended else {"finish_reason": None, "matched_stop": None}
        return [self._object(request, [{"index": index, "text": before + text, "logprobs": logprobs, **end}])]

    def _chat(self, index: int, request: Request, text: str, logprobs: Any, ended: bool) -> list[dict[str, Any]]:
        objects = []
        if not self._opened[index]:
            self._opened[index] = True
            objects.append(self._object(request, [_chat_choice(index, {"role": "assistant", "content": ""}, None)]))
        if text or logprobs:
            objects.append(self._object(request, [_chat_choice(index, {"content": text}, logprobs)]))
        if ended:
            self._endings.append((index, request))
        return objects

    def _object(self, request: Request, choices: list[dict[str, Any]]) -> dict[str, Any]:
        kind = "chat.completion.chunk" if self._call.is_chat else "text_completion"
        piece = {
            "id": request.rid,
            "object": kind,
            "created": self._created,
            "model": self._call.model,
            "choices": choices,
        }
        if self._call.continuous_usage and choices:
            piece["usage"] = usage([request], [request])
        elif choices and not self._call.is_chat:
            piece["usage"] = None
        return piece


def _chat_choice(
    index: int, delta: dict[str, Any], logprobs: Any, finish_reason: str | None = None, matched_stop: Any = None
) -> dict[str, Any]:
    return {
        "index": index,
        "delta": {"reasoning_content": None, **delta},
        "logprobs": logprobs,
        "finish_reason": finish_reason,
        "matched_stop": matched_stop,
    }


def ending(request: Request) -> dict[str, Any]:
    """Return how the answer ended."""
    reason = request.finish_reason or {}
    return {"finish_reason": reason.get("type"), "matched_stop": reason.get("matched")}


def echo(call: OpenAiCall, index: int) -> str:
    """Return the prompt's text when the call asks for it before the answer."""
    return call.echoes[index // call.n] if call.echoes else ""


def usage(prompts: list[Request], answers: list[Request]) -> dict[str, Any]:
    """Return token counts; the prompt of several answers counts once."""
    read, written = (sum(counts) for counts in ([len(r.prompt_ids) for r in prompts], [r.num_output for r in answers]))
    return {
        "prompt_tokens": read,
        "total_tokens": read + written,
        "completion_tokens": written,
        "prompt_tokens_details": {"cached_tokens": sum(request.cached_tokens for request in prompts)},
        "reasoning_tokens": 0,
        "completion_tokens_details": None,
    }


def error_body(message: str, status: int, kind: str | None = None) -> dict[str, Any]:
    """Return the description of an error as OpenAI clients read it."""
    kind = kind or ("BadRequestError" if status == 400 else "InternalServerError")
    return {"object": "error", "message": message, "type": kind, "param": None, "code": status}
