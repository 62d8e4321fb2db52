"""An in-process stand-in for router and engine: `/generate`, `/workers`, `/abort_request`, `/v1/loads`.

It answers with ids of a fixed script or of the prompt, keeps what it was asked, and can be told to hang or fail.
"""

from __future__ import annotations

import asyncio
import inspect
import threading
import time
from collections.abc import Callable
from typing import Any

from aiohttp import web


def reply(
    ids: list[int], text: str = "", finish: str = "stop", version: str | None = "1", **meta: Any
) -> dict[str, Any]:
    """A `/generate` answer with these sampled ids, each with log-prob -0.5."""
    meta_info = {
        "output_token_logprobs": [[-0.5, token, None] for token in ids],
        "finish_reason": {"type": finish},
        "cached_tokens": 0,
        "completion_tokens": len(ids),
        **meta,
    }
    if version is not None:
        meta_info["weight_version"] = version
    return {"text": text, "meta_info": meta_info}


async def until(condition: Callable[[], bool], what: str) -> None:
    """Wait inside of an `answer` for what has to come before it."""
    give_up_at = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < give_up_at, f"waited 60 s for {what}"
        await asyncio.sleep(0.002)


class FakeEngine:
    """Serves on a thread of its own. `answer(payload)`, async or not, gives the reply (its `after_s` delays it) or a list of all
    answers, an int for an error status, or "hang"."""

    def __init__(self, answer: Callable[[dict], Any] | None = None) -> None:
        self.answer = answer or (lambda payload: reply([7, 8, 9], "abc"))
        self.requests: list[dict] = []
        self.headers: list[dict] = []
        self.aborts = 0
        self.extra_workers: list[str] = []
        self.stream: Callable | None = None
        self._loop = asyncio.new_event_loop()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()
        assert self._ready.wait(60), "the fake engine did not start in 60 s"

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def _serve(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_until_complete(self._start())
        self._ready.set()
        self._loop.run_forever()
        self._abort_event.set()
        self._loop.run_until_complete(self._runner.cleanup())
        self._loop.run_until_complete(asyncio.sleep(0))

    async def _start(self) -> None:
        self._abort_event = asyncio.Event()
        app = web.Application()
        app.router.add_post("/generate", self._generate)
        app.router.add_get("/workers", self._workers)
        app.router.add_post("/abort_request", self._abort)
        app.router.add_get("/v1/loads", self._loads)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self.port = self._runner.addresses[0][1]

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(60)

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        if self.stream is not None:
            return await self.stream(request)
        payload = await request.json()
        self.requests.append(payload)
        self.headers.append(dict(request.headers))
        answer = self.answer(payload)
        if inspect.isawaitable(answer):
            answer = await answer
        if isinstance(answer, int):
            return web.json_response({"error": {"message": f"status {answer}"}}, status=answer)
        if isinstance(answer, tuple):
            return web.json_response({"error": {"message": answer[1]}}, status=answer[0])
        if isinstance(answer, float):
            await asyncio.sleep(answer)
            answer = reply([7, 8, 9], "abc")
        if isinstance(answer, dict) and "hang" not in answer:
            await asyncio.sleep(answer.pop("after_s", 0.0))
        elif not isinstance(answer, list):
            partial = answer["hang"] if isinstance(answer, dict) else []
            await self._abort_event.wait()
            answer = reply(partial, finish="abort")
        count = (payload.get("sampling_params") or {}).get("n", 1)
        return web.json_response([answer] * count if count > 1 and isinstance(answer, dict) else answer)

    async def _workers(self, request: web.Request) -> web.Response:
        urls = [f"http://127.0.0.1:{self.port}", *self.extra_workers]
        return web.json_response({"workers": [{"url": url} for url in urls]})

    async def _abort(self, request: web.Request) -> web.Response:
        self.aborts += 1
        self._abort_event.set()
        self._abort_event = asyncio.Event()
        return web.Response()

    async def _loads(self, request: web.Request) -> web.Response:
        return web.json_response({"loads": [{"num_running_reqs": 0, "num_waiting_reqs": 0}]})
