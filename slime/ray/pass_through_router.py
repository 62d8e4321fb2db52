"""A router that passes every body through as it is: ``python -m slime.ray.pass_through_router '{"port": ...}'``.

The sglang-router writes request bodies anew and drops fields that it does not know, such as ``return_routed_experts``. A run that
needs one of them gets this router instead. It has the same worker API (POST/GET ``/workers``, DELETE ``/workers/{id}``) and the
answers ``/liveness``, ``/readiness`` and ``/health`` of its own; everything else goes to a worker. Nothing is sent twice: the
client decides about retries. A caller that goes away takes its request with it.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import random
import sys
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field

import aiohttp
from aiohttp import web

ROUTING_KEY = "X-SMG-Routing-Key"
_MAX_BODY_BYTES = 1 << 30
_HEALTH_POLL_S = 0.1
_CONNECT_S = 10.0
_HOP_BY_HOP = frozenset("connection keep-alive transfer-encoding te trailer upgrade host content-length".split())


@dataclass
class Worker:
    """An engine. `load`: its requests in flight."""

    url: str
    id: str = field(default_factory=lambda: str(uuid.uuid4()))
    is_healthy: bool = False
    load: int = 0

    def described(self) -> dict:
        return {
            "id": self.id,
            "url": self.url,
            "is_healthy": self.is_healthy,
            "load": self.load,
            "worker_type": "regular",
        }


class Policy:
    """Picks the worker of a request.

    round_robin and random as they say; with consistent_hashing and manual requests of one routing key meet on one worker;
    the other policies of the sglang-router become the least loaded worker.
    """

    def __init__(self, name: str):
        self._turn = 0
        ways: dict[str, Callable] = {
            "round_robin": self._in_turn,
            "random": lambda workers, key: random.choice(workers),
            "consistent_hashing": self._by_key,
            "manual": self._by_key,
        }
        self._pick = ways.get(name, lambda workers, key: min(workers, key=lambda worker: worker.load))

    def pick(self, workers: list[Worker], key: str | None) -> Worker:
        return self._pick(workers, key)

    def _in_turn(self, workers: list[Worker], key: str | None) -> Worker:
        self._turn += 1
        return workers[self._turn % len(workers)]

    def _by_key(self, workers: list[Worker], key: str | None) -> Worker:
        """The worker whose hash with the key is highest: when one goes, only its own keys move."""
        if key is None:
            return self._in_turn(workers, key)
        return max(workers, key=lambda worker: hashlib.blake2b(f"{key} {worker.url}".encode(), digest_size=8).digest())


class PassThroughRouter:
    """Handlers of the routes; one session to all workers."""

    def __init__(self, policy: str, timeout_s: float):
        self._policy, self._timeout_s = Policy(policy), timeout_s
        self._workers: dict[str, Worker] = {}
        self._checks: set[asyncio.Task] = set()
        self._session: aiohttp.ClientSession | None = None

    def application(self) -> web.Application:
        """Return the aiohttp application."""
        app = web.Application(client_max_size=_MAX_BODY_BYTES)
        app.cleanup_ctx.append(self._resources)
        add = app.router.add_route
        add("POST", "/workers", self._add)
        add("GET", "/workers", self._list)
        add("DELETE", "/workers/{id}", self._remove)
        for path in ("/liveness", "/health"):
            add("GET", path, self._alive)
        add("GET", "/readiness", self._ready)
        add("*", "/{path:.*}", self._pass_on)
        return app

    async def _resources(self, _: web.Application):
        timeout = aiohttp.ClientTimeout(total=self._timeout_s, sock_connect=_CONNECT_S)
        connector = aiohttp.TCPConnector(limit=0)
        self._session = aiohttp.ClientSession(timeout=timeout, connector=connector, auto_decompress=False)
        yield
        for check in self._checks:
            check.cancel()
        await self._session.close()

    # ---- workers ----

    async def _add(self, request: web.Request) -> web.Response:
        url = str((await request.json())["url"]).rstrip("/")
        worker = next((known for known in self._workers.values() if known.url == url), None)
        if worker is None:
            worker = Worker(url)
            self._workers[worker.id] = worker
            check = asyncio.ensure_future(self._wait_healthy(worker))
            self._checks.add(check)
            check.add_done_callback(self._checks.discard)
        body = {"status": "accepted", "worker_id": worker.id, "url": url, "location": f"/workers/{worker.id}"}
        return web.json_response(body, status=202)

    async def _wait_healthy(self, worker: Worker) -> None:
        while worker.id in self._workers and not worker.is_healthy:
            with contextlib.suppress(aiohttp.ClientError, asyncio.TimeoutError):
                async with self._session.get(f"{worker.url}/health") as reply:
                    worker.is_healthy = reply.status == 200
            await asyncio.sleep(0 if worker.is_healthy else _HEALTH_POLL_S)

    async def _list(self, _: web.Request) -> web.Response:
        workers = [worker.described() for worker in self._workers.values()]
        return web.json_response({"workers": workers, "total": len(workers)})

    async def _remove(self, request: web.Request) -> web.Response:
        worker = self._workers.pop(request.match_info["id"], None)
        if worker is None:
            return web.json_response({"error": f"no worker {request.match_info['id']}"}, status=404)
        return web.json_response({"status": "accepted", "worker_id": worker.id}, status=202)

    async def _alive(self, _: web.Request) -> web.Response:
        return web.Response(text="OK")

    async def _ready(self, _: web.Request) -> web.Response:
        return web.Response(status=200 if self._healthy() else 503)

    def _healthy(self) -> list[Worker]:
        return [worker for worker in self._workers.values() if worker.is_healthy]

    # ---- everything else ----

    async def _pass_on(self, request: web.Request) -> web.StreamResponse:
        workers = self._healthy()
        if not workers:
            return _error("no_available_workers", 503)
        worker = self._policy.pick(workers, request.headers.get(ROUTING_KEY))
        worker.load += 1
        try:
            return await self._exchange(request, worker)
        except aiohttp.ClientConnectorError as error:
            return _error(f"worker {worker.url} does not answer: {error}", 503)
        except (aiohttp.ClientError, asyncio.TimeoutError) as error:
            return _error(f"worker {worker.url} broke off: {type(error).__name__}: {error}", 502)
        finally:
            worker.load -= 1

    async def _exchange(self, request: web.Request, worker: Worker) -> web.StreamResponse:
        url = worker.url + request.raw_path
        body = await request.read()
        headers = [(name, value) for name, value in _end_to_end(request.headers) if name.lower() != "content-encoding"]
        own = ("Accept-Encoding", "User-Agent", "Content-Type")  # the caller's, or none
        call = self._session.request(request.method, url, data=body, headers=headers, skip_auto_headers=own)
        async with call as reply:
            headers = _end_to_end(reply.headers)
            if reply.content_length is not None:
                return web.Response(status=reply.status, headers=headers, body=await reply.read())
            answer = web.StreamResponse(status=reply.status, headers=headers)
            await answer.prepare(request)
            try:
                async for chunk in reply.content.iter_any():
                    await answer.write(chunk)
                await answer.write_eof()
            except (aiohttp.ClientError, asyncio.TimeoutError):
                # The head of the answer is out: only a broken connection tells the caller that the rest is missing.
                if request.transport is not None:
                    request.transport.abort()
            return answer


def _end_to_end(headers) -> list[tuple[str, str]]:
    return [(name, value) for name, value in headers.items() if name.lower() not in _HOP_BY_HOP]


def _error(message: str, status: int) -> web.Response:
    return web.json_response({"error": {"message": message, "code": status}}, status=status)


async def serve(fields: dict) -> None:
    """Serve until the process is ended."""
    router = PassThroughRouter(fields["policy"], fields["request_timeout_secs"])
    runner = web.AppRunner(router.application(), handler_cancellation=True, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, fields["host"], fields["port"]).start()
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(serve(json.loads(sys.argv[1])))
