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
    """Pieces of /generate; those of a list call carry their `index`."""

    def __init__(self, writer: ReplyWriter, call: GenerateCall):
        self._writer, self._call = writer, call
        self._index = {id(request): i for i, request in enumerate(call.requests)}
        self._texts: list[TextStream] = [writer.text_stream(request) for request in call.requests]
        self._num_sent = [0] * len(call.requests)

    def of(self, request: Request, chunk: Chunk | None) -> list[dict[str, Any]]:
        index, with_text = self._index[id(request)], self._call.text_in_logprobs
        texts = self._texts[index]
        if request.error is not None:
            return [{"error": {"message": request.error}}]
        if chunk is None:
            text = texts.finish(request.text)
            piece = self._writer.last_piece(request, self._num_sent[index], text, with_text)
        else:
            piece = self._writer.piece(request, chunk, texts.push(chunk.token_ids), with_text)
            self._num_sent[index] = chunk.num_output
        if self._call.is_list:
            piece["index"] = index
        return [piece]

    def closing(self) -> list[dict[str, Any]]:
        return []


async def _send(response: web.StreamResponse, objects: list[dict[str, Any]]) -> None:
    if objects:
        await response.write(b"".join(b"data: " + orjson.dumps(content) + b"\n\n" for content in objects))
