"""Routes of the embedded engine: SGLang's native HTTP API over one Scheduler.

Invariants: no payload ends the process; a wrong one is answered with 400 and a message. A client that goes away frees
what it held. Tensors are touched only through `Scheduler.call`. Knows JSON and sockets, no model.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from aiohttp import web

from slime.engine import memory
from slime.engine.call_runner import CallRunner
from slime.engine.http_json import errors_as_json, field, json_body, json_reply, success, version_of
from slime.engine.info import ServerInfo
from slime.engine.scheduler import EngineDead, Events, Scheduler
from slime.engine.streams import NativePieces
from slime.engine.weight_updates import UpdateRefused, WeightUpdates
from slime.engine.wire import CallParser, GenerateCall, ReplyWriter

MAX_BODY_BYTES = 1 << 30
HEALTH_DEADLINE_S = 20.0


class HttpApi:
    """Handlers of all routes. `loop` must be the running loop before the scheduler starts."""

    def __init__(
        self,
        scheduler: Scheduler,
        updates: WeightUpdates,
        parser: CallParser,
        writer: ReplyWriter,
        info: ServerInfo,
        runner: CallRunner,
        streams_increments: bool,
    ):
        self._scheduler, self._updates, self._parser, self._writer = scheduler, updates, parser, writer
        self._info, self._runner, self._streams_increments = info, runner, streams_increments

    def application(self) -> web.Application:
        """Return the aiohttp application with all routes."""
        app = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=[errors_as_json])
        for paths, handler in (
            ("/health", self._health),
            ("/ready", self._ready),
            ("/health_generate", self._health_generate),
            ("/get_model_info /model_info", self._json_of(self._info.model_info)),
            ("/get_server_info /server_info", self._json_of(self._info.server_info)),
            ("/v1/loads", self._json_of(self._info.loads)),
            ("/get_load", self._json_of(self._info.load_list)),
            ("/get_weight_version", self._json_of(self._info.weight_version)),
            ("/metrics", self._metrics),
            ("/flush_cache", self._flush_cache),
            ("/release_memory_occupation", self._release_memory),
            ("/resume_memory_occupation", self._resume_memory),
        ):
            for path in paths.split():
                app.router.add_get(path, handler)
        for path, handler in (
            ("/generate", self._generate),
            ("/abort_request", self._abort),
            ("/pause_generation", self._pause),
            ("/continue_generation", self._continue),
            ("/flush_cache", self._flush_cache),
            ("/begin_weight_update", self._begin_update),
            ("/end_weight_update", self._end_update),
            ("/init_weights_update_group", self._init_group),
            ("/destroy_weights_update_group", self._destroy_group),
            ("/update_weights_from_distributed", self._update_from_distributed),
            ("/update_weights_from_tensor", self._update_from_tensor),
            ("/update_weights_from_disk", self._update_from_disk),
            ("/update_weight_version", self._update_version),
            ("/weights_checker", self._weights_checker),
            ("/get_weights_by_name", self._weights_by_name),
            ("/release_memory_occupation", self._release_memory),
            ("/resume_memory_occupation", self._resume_memory),
        ):
            app.router.add_post(path, handler)
        return app

    # ---- generation ----

    async def _generate(self, http: web.Request) -> web.StreamResponse:
        call = self._parser.parse(await json_body(http))
        if call.stream:
            return await self._runner.stream(
                http, call.requests, NativePieces(self._writer, call, self._streams_increments)
            )
        return await self._answer(call)

    async def _answer(self, call: GenerateCall) -> web.Response:
        await self._runner.collect(call.requests)
        replies = [self._writer.reply(request, call.text_in_logprobs) for request in call.requests]
        return json_reply(replies if call.is_list else replies[0])

    async def _abort(self, http: web.Request) -> web.Response:
        body = await json_body(http)
        rid = None if body.get("abort_all") else body.get("rid")
        if rid is None and not body.get("abort_all"):
            raise ValueError("abort_request needs rid or abort_all")
        await self._control(lambda: self._scheduler.abort(rid), "abort")
        return web.Response()

    # ---- state ----

    async def _health(self, _: web.Request) -> web.Response:
        if self._scheduler.failure is not None:
            raise EngineDead(self._scheduler.failure)
        return web.Response(text="ok")

    async def _ready(self, http: web.Request) -> web.Response:
        await self._health(http)
        return web.Response()

    async def _health_generate(self, _: web.Request) -> web.Response:
        """200 once a token was generated, or when generation is held up on purpose and the engine thread is alive."""
        scheduler = self._scheduler
        if scheduler.failure is None and (scheduler.paused or scheduler.released or scheduler.busy_with):
            return web.Response(text="ok: generation is on hold")
        body = {"input_ids": [0], "sampling_params": {"max_new_tokens": 1, "temperature": 0}, "rid": "HEALTH_CHECK"}
        try:
            await asyncio.wait_for(self._runner.collect(self._parser.parse(body).requests), HEALTH_DEADLINE_S)
        except asyncio.TimeoutError as error:
            if scheduler.paused or scheduler.busy_with:
                return web.Response(text="ok: generation is on hold")
            raise EngineDead(f"no token within {HEALTH_DEADLINE_S:g} s; {scheduler.num_running} running") from error
        return web.Response(text="ok")

    async def _metrics(self, _: web.Request) -> web.Response:
        return web.Response(text=self._info.metrics())

    @staticmethod
    def _json_of(source: Callable[[], Any]) -> Callable:
        async def handler(_: web.Request) -> web.Response:
            return json_reply(source())

        return handler

    # ---- control ----

    async def _control(self, function: Callable[[], Any], name: str) -> Any:
        return await asyncio.wrap_future(self._scheduler.call(function, name))

    async def _pause(self, http: web.Request) -> web.Response:
        mode = (await json_body(http)).get("mode") or "abort"
        await self._control(lambda: self._scheduler.pause(mode), "pause")
        return json_reply({"message": f"Generation paused ({mode}).", "status": "ok"})

    async def _continue(self, http: web.Request) -> web.Response:
        await json_body(http)
        await self._control(self._scheduler.resume, "continue")
        return json_reply({"message": "Generation continued.", "status": "ok"})

    async def _flush_cache(self, _: web.Request) -> web.Response:
        if not await self._control(self._scheduler.flush, "flush"):
            return web.Response(status=400, text="Flush cache failed: requests are running or waiting.\n")
        return web.Response(text="Cache flushed.\n")

    async def _release_memory(self, http: web.Request) -> web.Response:
        tags = (await json_body(http, required=False)).get("tags")
        await self._control(lambda: memory.release(self._scheduler, tags), "release memory")
        return json_reply(None)

    async def _resume_memory(self, http: web.Request) -> web.Response:
        tags = (await json_body(http, required=False)).get("tags")
        await self._control(lambda: memory.resume(self._scheduler, tags), "resume memory")
        return json_reply(None)

    # ---- weights ----

    async def _begin_update(self, _: web.Request) -> web.Response:
        await self._control(self._updates.begin, "begin weight update")
        return success("weight update begun")

    async def _end_update(self, _: web.Request) -> web.Response:
        await self._control(self._updates.end, "end weight update")
        return success("weight update ended")

    async def _init_group(self, http: web.Request) -> web.Response:
        body = await json_body(http)
        address, name = field(body, "master_address", str), field(body, "group_name", str)
        port, rank, size = (field(body, key, int) for key in ("master_port", "rank_offset", "world_size"))
        backend = body.get("backend") or "nccl"
        # Waiting for peers must hold up neither the event loop nor generation.
        await asyncio.to_thread(self._updates.init_group, address, port, rank, size, name, backend)
        return success(f"joined group {name} as rank {rank} of {size}")

    async def _destroy_group(self, http: web.Request) -> web.Response:
        name = field(await json_body(http), "group_name", str)
        if not await self._control(lambda: self._updates.destroy_group(name), "destroy group"):
            raise UpdateRefused(f"no weight update group {name!r}")
        return success(f"left group {name}")

    async def _update_from_distributed(self, http: web.Request) -> web.Response:
        body = await json_body(http)
        lists = [field(body, key, list) for key in ("names", "dtypes", "shapes")]
        if body.get("load_format") not in (None, "auto"):
            raise ValueError(f"load_format {body['load_format']!r} is not supported for distributed updates")
        group = body.get("group_name") or "weight_update_group"
        version = version_of(body)

        def update() -> None:
            self._updates.from_distributed(*lists, group)
            if version is not None:
                self._scheduler.set_weight_version(version)

        await self._control(update, "update_weights_from_distributed")
        return success(f"updated {len(lists[0])} weights")

    async def _update_from_tensor(self, http: web.Request) -> web.Response:
        body = await json_body(http)
        serialized, version = field(body, "serialized_named_tensors", list), version_of(body)

        def update() -> int:
            count = self._updates.from_tensor(serialized, body.get("load_format"))
            if version is not None:
                self._scheduler.set_weight_version(version)
            return count

        count = await self._control(update, "update_weights_from_tensor")
        return success(f"updated {count} weights")

    async def _update_from_disk(self, http: web.Request) -> web.Response:
        body = await json_body(http)
        path, version = field(body, "model_path", str), version_of(body)

        def update() -> None:
            self._updates.from_disk(path)
            if version is not None:
                self._scheduler.set_weight_version(version)

        try:
            await self._control(update, "update_weights_from_disk")
        except UpdateRefused as error:
            return json_reply({"success": False, "message": str(error), "num_paused_requests": 0}, 400)
        return json_reply({"success": True, "message": f"weights read from {path}", "num_paused_requests": 0})

    async def _update_version(self, http: web.Request) -> web.Response:
        body = await json_body(http)
        version = str(field(body, "new_version", (str, int)))

        def update() -> None:
            if body.get("abort_all_requests"):
                self._scheduler.abort(None)
            self._scheduler.set_weight_version(version)

        await self._control(update, "update_weight_version")
        return json_reply({"success": True, "message": "weight version set", "new_version": version})

    async def _weights_checker(self, http: web.Request) -> web.Response:
        action = field(await json_body(http), "action", str)
        result = await self._control(lambda: self._updates.check(action), f"weights_checker {action}")
        return json_reply({"success": True, "message": f"{action} done", **result})

    async def _weights_by_name(self, http: web.Request) -> web.Response:
        body = await json_body(http)
        name, count = field(body, "name", str), field({"truncate_size": 100, **body}, "truncate_size", int)
        return json_reply(await self._control(lambda: self._info.weight_values(name, count), "get_weights_by_name"))


def dispatch(events: Events) -> None:
    """Hand events of the engine thread to the calls that wait for them; runs on the event loop."""
    for request, chunk in events:
        request.sink.put(request, chunk)
