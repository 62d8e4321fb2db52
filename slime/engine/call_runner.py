"""Runs the requests of one HTTP call: whole answers or a stream. A caller that goes away takes its requests with it."""

from __future__ import annotations

import asyncio

from aiohttp import web

from slime.engine.requests import Request
from slime.engine.scheduler import EngineDead, Scheduler
from slime.engine.streams import Collector, Pieces, StreamWriter


class CallRunner:
    """On the event loop; the scheduler has its own thread."""

    def __init__(self, scheduler: Scheduler):
        self._scheduler = scheduler

    async def collect(self, requests: list[Request]) -> None:
        """Run requests to their end.

        Raises: ValueError for a refused one, EngineDead when the engine cannot answer.
        """
        collector = Collector(len(requests))
        self._submit(requests, collector)
        try:
            await collector.done
        except asyncio.CancelledError:
            self._drop(requests)
            raise
        for request in requests:
            if request.error is not None:
                raise ValueError(request.error) if request.is_client_error else EngineDead(request.error)

    async def stream(self, http: web.Request, requests: list[Request], pieces: Pieces) -> web.StreamResponse:
        """Send what `pieces` makes of the requests' progress as server-sent events."""
        writer = StreamWriter(pieces, len(requests))
        self._submit(requests, writer)
        try:
            return await writer.run(http)
        except (asyncio.CancelledError, ConnectionError):
            self._drop(requests)
            raise

    def _submit(self, requests: list[Request], sink: Collector | StreamWriter) -> None:
        for request in requests:
            request.sink = sink
        self._scheduler.submit(*requests)

    def _drop(self, requests: list[Request]) -> None:
        ended = {id(request) for request in requests}
        self._scheduler.call(lambda: self._scheduler.abort_where(lambda r: id(r) in ended), "abort")
