"""Routes below /v1 that OpenAI clients use. Knows JSON and sockets, no model."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from aiohttp import web

from slime.engine.call_runner import CallRunner
from slime.engine.chat_template import MalformedBody
from slime.engine.http_json import json_body, json_reply
from slime.engine.info import ServerInfo
from slime.engine.openai_replies import OpenAiPieces, OpenAiWriter, error_body
from slime.engine.openai_requests import OpenAiCall, OpenAiParser
from slime.engine.scheduler import EngineDead


class OpenAiApi:
    """Handlers of /v1/models, /v1/completions and /v1/chat/completions."""

    def __init__(self, runner: CallRunner, parser: OpenAiParser, writer: OpenAiWriter, info: ServerInfo):
        self._runner, self._parser, self._writer, self._info = runner, parser, writer, info

    def add_routes(self, app: web.Application) -> None:
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/v1/models/{name:.+}", self._model)
        app.router.add_post("/v1/completions", self._completions)
        app.router.add_post("/v1/chat/completions", self._chat)

    async def _models(self, _: web.Request) -> web.Response:
        return json_reply(self._info.models())

    async def _model(self, http: web.Request) -> web.Response:
        name, card = http.match_info["name"], self._info.models()["data"][0]
        if name != card["id"]:
            error = {"message": f"The model {name!r} does not exist", "type": "invalid_request_error"}
            return json_reply({"error": {**error, "param": "model", "code": "model_not_found"}}, 404)
        return json_reply(card)

    async def _completions(self, http: web.Request) -> web.StreamResponse:
        return await self._run(http, self._parser.completion)

    async def _chat(self, http: web.Request) -> web.StreamResponse:
        return await self._run(http, self._parser.chat)

    async def _run(self, http: web.Request, parse: Callable[[dict], OpenAiCall]) -> web.StreamResponse:
        try:
            body = await json_body(http)
            call = await asyncio.to_thread(parse, body)
            if call.generate.stream:
                return await self._runner.stream(http, call.generate.requests, OpenAiPieces(self._writer, call))
            await self._runner.collect(call.generate.requests)
        except MalformedBody as error:
            return _error(str(error), 400, "Bad Request")
        except ValueError as error:
            return _error(str(error), 400)
        except EngineDead as error:
            return _error(str(error), 500)
        return json_reply(self._writer.reply(call))


def _error(message: str, status: int, kind: str | None = None) -> web.Response:
    """SGLang answers the bare description, OpenAI puts it below `error`: clients of either find what they look for."""
    body = error_body(message, status, kind)
    return json_reply({**body, "error": body}, status)
