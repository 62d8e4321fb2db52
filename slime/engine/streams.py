"""Where results of the engine thread meet the HTTP calls that wait for them: whole answers and SSE streams.

Everything here runs on the event loop. Invariant: the pieces of a stream join to the non-streaming answer.
"""

from __future__ import annotations

import asyncio
from typing import Any

import orjson
from aiohttp import web

from slime.engine.requests import Chunk, Request
from slime.engine.tokenizer import TextStream
from slime.engine.wire import GenerateCall, ReplyWriter


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
    """Write the events of a call as server-sent events; pieces of a list call carry their `index`."""

    def __init__(self, writer: ReplyWriter, call: GenerateCall):
        self._writer, self._call = writer, call
        self._queue: asyncio.Queue[tuple[Request, Chunk | None]] = asyncio.Queue()
        self._index = {id(request): i for i, request in enumerate(call.requests)}
        self._texts = [writer.text_stream(request) for request in call.requests]
        self._num_sent = [0] * len(call.requests)

    def put(self, request: Request, chunk: Chunk | None) -> None:
        self._queue.put_nowait((request, chunk))

    async def run(self, http: web.Request) -> web.StreamResponse:
        """Send pieces until all requests have ended."""
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        await response.prepare(http)
        open_requests = len(self._call.requests)
        while open_requests:
            request, chunk = await self._queue.get()
            open_requests -= chunk is None
            await response.write(b"data: " + orjson.dumps(self._piece(request, chunk)) + b"\n\n")
        await response.write(b"data: [DONE]\n\n")
        await response.write_eof()
        return response

    def _piece(self, request: Request, chunk: Chunk | None) -> dict[str, Any]:
        index, with_text = self._index[id(request)], self._call.text_in_logprobs
        texts: TextStream = self._texts[index]
        if request.error is not None:
            return {"error": {"message": request.error}}
        if chunk is None:
            text = texts.finish(request.text)
            piece = self._writer.last_piece(request, self._num_sent[index], text, with_text)
        else:
            piece = self._writer.piece(request, chunk, texts.push(chunk.token_ids), with_text)
            self._num_sent[index] = chunk.num_output
        if self._call.is_list:
            piece["index"] = index
        return piece
