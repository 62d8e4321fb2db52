"""Where results of the engine thread meet the HTTP calls that wait for them: whole answers and SSE streams.

Everything here runs on the event loop. Invariant: the pieces of a stream join to the non-streaming answer.
"""

from __future__ import annotations

import asyncio
from typing import Any, Protocol

import orjson
from aiohttp import web

from slime.engine.requests import Chunk, Request
from slime.engine.tokenizer import TextStream
from slime.engine.wire import GenerateCall, ReplyWriter


class Pieces(Protocol):
    """Turns the progress of a call's requests into the objects that its stream carries."""

    def of(self, request: Request, chunk: Chunk | None) -> list[dict[str, Any]]:
        """Objects for new output of a request, or for its end (`chunk` None)."""
        ...

    def closing(self) -> list[dict[str, Any]]:
        """Objects after the end of all requests."""
        ...


class Collector:
    """A future that is done when all requests of a call have ended."""

    def __init__(self, count: int):
        self._missing = count
        self.done: asyncio.Future = asyncio.get_running_loop().create_future()

    def put(self, request: Request, chunk: Chunk | None) -> None:
        self._missing -= 1
        if not self._missing and not self.done.done():
            self.done.set_result(None)


class StreamWriter:
    """Write the events of a call as server-sent events."""

    def __init__(self, pieces: Pieces, num_requests: int):
        self._pieces, self._num_open = pieces, num_requests
        self._queue: asyncio.Queue[tuple[Request, Chunk | None]] = asyncio.Queue()

    def put(self, request: Request, chunk: Chunk | None) -> None:
        self._queue.put_nowait((request, chunk))

    async def run(self, http: web.Request) -> web.StreamResponse:
        """Send pieces until all requests have ended."""
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        await response.prepare(http)
        while self._num_open:
            request, chunk = await self._queue.get()
            self._num_open -= chunk is None
            await _send(response, self._pieces.of(request, chunk))
        await _send(response, self._pieces.closing())
        await response.write(b"data: [DONE]\n\n")
        await response.write_eof()
        return response


class NativePieces:
    """Pieces of /generate; those of a list call carry their `index`.

    Each holds the answer so far, as SGLang's do, or with `is_incremental` only what is new.
    """

    def __init__(self, writer: ReplyWriter, call: GenerateCall, is_incremental: bool):
        self._writer, self._call, self._is_incremental = writer, call, is_incremental
        self._progress = {id(request): Progress(i, writer, request) for i, request in enumerate(call.requests)}

    def of(self, request: Request, chunk: Chunk | None) -> list[dict[str, Any]]:
        if request.error is not None:
            return [{"error": {"message": request.error}}]
        progress, with_text = self._progress[id(request)], self._call.text_in_logprobs
        first = progress.num_sent if self._is_incremental else 0
        if chunk is None:
            text = progress.texts.finish(request.text) if self._is_incremental else request.text
            piece = self._writer.last_piece(request, first, text, with_text, was_begun=progress.num_sent > 0)
        else:
            progress.push(chunk)
            text = progress.new_text if self._is_incremental else progress.text
            ids, logprobs = progress.ids[first:], progress.logprobs[first:]
            piece = self._writer.piece(request, chunk, first, ids, logprobs, text, with_text)
        if self._call.is_list:
            piece["index"] = progress.index
        return [piece]

    def closing(self) -> list[dict[str, Any]]:
        return []


class Progress:
    """What of one streaming answer is out."""

    def __init__(self, index: int, writer: ReplyWriter, request: Request):
        self.index, self.num_sent = index, 0
        self.texts: TextStream = writer.text_stream(request)
        self.text, self.new_text = "", ""
        self.ids: list[int] = []
        self.logprobs: list[float] = []

    def push(self, chunk: Chunk) -> None:
        self.num_sent = chunk.num_output
        self.ids += chunk.token_ids
        self.logprobs += chunk.logprobs
        self.new_text = self.texts.push(chunk.token_ids)
        self.text += self.new_text


async def _send(response: web.StreamResponse, objects: list[dict[str, Any]]) -> None:
    if objects:
        await response.write(b"".join(b"data: " + orjson.dumps(content) + b"\n\n" for content in objects))
