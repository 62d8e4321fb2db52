"""Routes of a reward engine (`slime engine --is-embedding`): SGLang's `/classify` over one reward model.

Invariants: no payload ends the process; sequences are scored in one thread, in the order in which they came. Knows no samples.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from aiohttp import web

from slime.engine.http_json import errors_as_json, json_body, json_reply
from slime.engine.server_args import ServerArgs
from slime.utils.reward_model import RewardModel

MAX_BODY_BYTES = 1 << 26


class RewardApi:
    """Loads the model at once. Raises: ValueError when the folder holds no reward model."""

    def __init__(self, args: ServerArgs):
        torch.set_num_threads(args.num_threads)
        self._args, self._model = args, RewardModel(args.model_path, args.dtype)
        self._thread = ThreadPoolExecutor(1, "reward-model")

    def application(self) -> web.Application:
        """Return the aiohttp application with all routes."""
        app = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=[errors_as_json])
        app.router.add_post("/classify", self._classify)
        for path in ("/health", "/health_generate"):
            app.router.add_get(path, self._health)
        for path in ("/model_info", "/get_model_info"):
            app.router.add_get(path, self._info)
        return app

    async def _classify(self, http: web.Request) -> web.Response:
        body = await json_body(http)
        sequences, is_list = _sequences(body, self._model)
        loop = asyncio.get_running_loop()
        scores = [await loop.run_in_executor(self._thread, self._model.score, ids) for ids in sequences]
        replies = [
            {"embedding": [score], "meta_info": {"prompt_tokens": len(ids), "cached_tokens": 0}}
            for score, ids in zip(scores, sequences, strict=True)
        ]
        return json_reply(replies if is_list else replies[0])

    async def _health(self, _: web.Request) -> web.Response:
        return web.Response(text="ok")

    async def _info(self, _: web.Request) -> web.Response:
        return json_reply({"model_path": self._args.model_path, "is_generation": False})


def _sequences(body: dict[str, Any], model: RewardModel) -> tuple[list[list[int]], bool]:
    """Return the token ids of `text` or `input_ids`, one or several, and whether several were given.

    Raises: ValueError for anything else.
    """
    text, ids = body.get("text"), body.get("input_ids")
    if isinstance(text, str):
        return [model.encode(text)], False
    if isinstance(text, list) and text and all(isinstance(item, str) for item in text):
        return [model.encode(item) for item in text], True
    if isinstance(ids, list) and ids:
        rows = ids if isinstance(ids[0], list) else [ids]
        if all(isinstance(row, list) and all(type(token) is int for token in row) for row in rows):
            return rows, rows is ids
    raise ValueError("classify needs text (a string or a list of them) or input_ids (a list of ids, or of such lists)")
