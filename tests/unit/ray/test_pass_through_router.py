"""The router that changes nothing: bodies arrive whole, workers come and go, keys stick, nobody hangs."""

from __future__ import annotations

import asyncio
import json

import pytest
from aiohttp import ClientError, ClientSession, web
from aiohttp.test_utils import TestClient, TestServer

from slime.ray.pass_through_router import PassThroughRouter, Policy, Worker

DEADLINE_S = 60.0


class Engine:
    """A worker that answers with what it was sent."""

    def __init__(self, name: str):
        self.name, self.bodies, self.gone = name, [], asyncio.Event()

    async def start(self) -> str:
        app = web.Application()
        app.router.add_get("/health", lambda request: web.Response())
        app.router.add_post("/generate", self._generate)
        app.router.add_post("/stream", self._stream)
        app.router.add_post("/slow", self._slow)
        app.router.add_post("/broken", self._broken)
        app.router.add_post("/headers", lambda request: web.json_response(dict(request.headers)))
        self.runner = web.AppRunner(app, handler_cancellation=True)
        await self.runner.setup()
        site = web.TCPSite(self.runner, "127.0.0.1", 0)
        await site.start()
        return f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}"

    async def _generate(self, request: web.Request) -> web.Response:
        self.bodies.append(await request.text())
        return web.json_response({"engine": self.name}, status=int(request.query.get("status", 200)))

    async def _stream(self, request: web.Request) -> web.StreamResponse:
        answer = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await answer.prepare(request)
        for piece in ("data: 1\n\n", "data: [DONE]\n\n"):
            await answer.write(piece.encode())
        return answer

    async def _broken(self, request: web.Request) -> web.StreamResponse:
        answer = web.StreamResponse()
        await answer.prepare(request)
        await answer.write(b"data: 1")
        request.transport.abort()
        return answer

    async def _slow(self, request: web.Request) -> web.Response:
        try:
            await asyncio.sleep(10 * DEADLINE_S)
        except asyncio.CancelledError:
            self.gone.set()
            raise


def serve(scenario, num_engines: int = 2, policy: str = "round_robin"):
    """Run `scenario(client, engines)` against a router with healthy workers."""

    async def run():
        engines = [Engine(str(i)) for i in range(num_engines)]
        urls = [await engine.start() for engine in engines]
        app = PassThroughRouter(policy, DEADLINE_S).application()
        async with TestClient(TestServer(app, handler_cancellation=True)) as client:
            for url in urls:
                assert (await client.post("/workers", json={"url": url, "worker_type": "regular"})).status == 202
            while not all(worker["is_healthy"] for worker in await workers_of(client)):
                await asyncio.sleep(0.01)
            await scenario(client, engines)
        for engine in engines:
            await engine.runner.cleanup()

    asyncio.run(asyncio.wait_for(run(), DEADLINE_S))


async def workers_of(client) -> list[dict]:
    return (await (await client.get("/workers")).json())["workers"]


def test_bodies_and_statuses_pass_unchanged_and_workers_take_turns():
    async def scenario(client, engines):
        body = json.dumps({"input_ids": [1], "return_routed_experts": True, "my_own": {"key": [None]}})
        names = []
        for _ in range(4):
            reply = await client.post("/generate", data=body, headers={"Content-Type": "application/json"})
            names.append((await reply.json())["engine"])
        assert sorted(names) == ["0", "0", "1", "1"]
        assert {text for engine in engines for text in engine.bodies} == {body}
        assert (await client.post("/generate?status=400", data=body)).status == 400

    serve(scenario)


def test_streams_pass():
    async def scenario(client, engines):
        reply = await client.post("/stream")
        assert reply.headers["Content-Type"] == "text/event-stream"
        assert await reply.text() == "data: 1\n\ndata: [DONE]\n\n"

    serve(scenario)


def test_a_stream_that_a_worker_breaks_off_breaks_off_for_the_caller_too():
    async def scenario(client, engines):
        reply = await client.post("/broken")
        with pytest.raises(ClientError):
            await asyncio.wait_for(reply.read(), DEADLINE_S / 2)

    serve(scenario)


def test_headers_say_what_the_caller_said_and_not_that_an_unpacked_body_is_packed():
    async def scenario(client, engines):
        reply = await client.post("/headers", data=b"{}" * 100, compress="gzip", skip_auto_headers=["Accept-Encoding"])
        names = {name.lower() for name in await reply.json()}
        assert not names & {"content-encoding", "accept-encoding"}

    serve(scenario)


def test_a_worker_that_leaves_gets_nothing_more_and_none_left_is_a_503():
    async def scenario(client, engines):
        first, second = await workers_of(client)
        again = await (await client.post("/workers", json={"url": first["url"]})).json()
        assert again["worker_id"] == first["id"]
        assert (await client.delete(f"/workers/{first['id']}")).status == 202
        assert (await client.delete("/workers/unknown")).status == 404
        for _ in range(3):
            assert (await (await client.post("/generate", data="{}")).json())["engine"] == "1"
        await client.delete(f"/workers/{second['id']}")
        reply = await client.post("/generate", data="{}")
        assert reply.status == 503 and "no_available_workers" in await reply.text()
        assert (await client.get("/readiness")).status == 503 and (await client.get("/liveness")).status == 200

    serve(scenario)


def test_a_dead_worker_is_an_error_and_is_not_asked_twice():
    async def scenario(client, engines):
        await engines[0].runner.cleanup()
        reply = await client.post("/generate", data="{}")
        assert reply.status in (502, 503) and "worker http://" in await reply.text()

    serve(scenario, num_engines=1)


def test_a_caller_that_goes_away_takes_its_request_with_it():
    async def scenario(client, engines):
        async with ClientSession() as session:
            call = asyncio.ensure_future(session.post(client.make_url("/slow"), data="{}"))
            while (await workers_of(client))[0]["load"] == 0:
                await asyncio.sleep(0.01)
            call.cancel()
        await asyncio.wait_for(engines[0].gone.wait(), DEADLINE_S / 2)
        while (await workers_of(client))[0]["load"]:
            await asyncio.sleep(0.01)

    serve(scenario, num_engines=1)


@pytest.mark.parametrize("name", ["consistent_hashing", "manual"])
def test_requests_of_one_key_meet_on_one_worker_and_other_keys_stay_when_one_leaves(name):
    policy, workers = Policy(name), [Worker(f"http://engine-{i}") for i in range(4)]
    keys = [f"session-{i}" for i in range(100)]
    before = {key: policy.pick(workers, key) for key in keys}
    assert len({worker.url for worker in before.values()}) == 4
    fewer = workers[1:]
    assert all(policy.pick(fewer, key) is worker for key, worker in before.items() if worker is not workers[0])


def test_other_policies_take_the_least_loaded_worker():
    workers = [Worker("http://a", load=3), Worker("http://b", load=1)]
    assert Policy("cache_aware").pick(workers, None).url == "http://b"
    assert {Policy("random").pick(workers, None).url for _ in range(50)} == {"http://a", "http://b"}
