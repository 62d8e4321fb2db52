"""Routes that load and unload adapters, with SGLang's names and fields."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from aiohttp import web

from slime.engine.http_json import field, json_body, json_reply
from slime.engine.lora import TENSOR_PATH, Adapter, AdapterStore
from slime.engine.scheduler import Scheduler
from slime.utils import peft_format, tensor_wire

_POLL_S = 0.02
UNLOAD_DEADLINE_S = 600.0
"""How long an unload waits for the adapter's requests; called again, it waits on."""


class LoraApi:
    """Handlers of /load_lora_adapter, /load_lora_adapter_from_tensors and /unload_lora_adapter."""

    def __init__(self, scheduler: Scheduler, store: AdapterStore):
        self._scheduler, self._store = scheduler, store

    def add_routes(self, app: web.Application) -> None:
        app.router.add_post("/load_lora_adapter", self._answering(self._load))
        app.router.add_post("/load_lora_adapter_from_tensors", self._answering(self._load_from_tensors))
        app.router.add_post("/unload_lora_adapter", self._answering(self._unload))

    def _answering(self, handle: Callable) -> Callable:
        async def handler(http: web.Request) -> web.Response:
            try:
                await handle(await json_body(http))
            except ValueError as error:
                return json_reply({"success": False, "error_message": str(error), "loaded_adapters": None}, 400)
            return json_reply({"success": True, "error_message": None, "loaded_adapters": self._store.paths()})

        return handler

    async def _load(self, body: dict) -> None:
        name, path = field(body, "lora_name", str), field(body, "lora_path", str)
        await self._add(lambda: self._store.make(name, *peft_format.read_adapter(path), path))

    async def _load_from_tensors(self, body: dict) -> None:
        name, config = field(body, "lora_name", str), field(body, "config_dict", dict)
        texts = field(body, "serialized_named_tensors", list)
        if len(texts) != 1 or not isinstance(texts[0], str):
            raise ValueError(f"serialized_named_tensors must hold one string, for the one rank; got {len(texts)}")

        def make() -> Adapter:
            payload = tensor_wire.deserialize(texts[0])
            tensors = dict(tensor_wire.named_tensors_of(payload, body.get("load_format")))
            return self._store.make(name, config, tensors, TENSOR_PATH)

        await self._add(make)

    async def _add(self, make: Callable[[], Adapter]) -> None:
        adapter = await asyncio.to_thread(make)
        await self._control(lambda: self._store.add(adapter), "load adapter")

    async def _unload(self, body: dict) -> None:
        """Wait for the adapter's requests; while generation is paused they wait themselves, for what is loaded then."""
        name, started = field(body, "lora_name", str), time.monotonic()
        await self._control(lambda: self._store.retire(name), "unload adapter")
        while not await self._control(lambda: self._try_drop(name), "unload adapter"):
            if time.monotonic() - started > UNLOAD_DEADLINE_S:
                raise ValueError(
                    f"requests of LoRA adapter {name} still run after {UNLOAD_DEADLINE_S:g} s; unload it again"
                )
            await asyncio.sleep(_POLL_S)

    def _try_drop(self, name: str) -> bool:
        scheduler = self._scheduler
        if not scheduler.paused:
            live = (*scheduler.batch.requests, *scheduler.waiting)
            if any(request.lora_name == name for request in live):
                return False
        self._store.drop(name)
        return True

    async def _control(self, function: Callable, name: str):
        return await asyncio.wrap_future(self._scheduler.call(function, name))
