"""JSON bodies in, JSON replies and errors out, for all routes. Knows no route."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

import orjson
from aiohttp import web

from slime.engine.scheduler import EngineDead
from slime.engine.weight_updates import UpdateRefused

logger = logging.getLogger(__name__)


async def json_body(http: web.Request, required: bool = True) -> dict[str, Any]:
    """Return the JSON object of a request.

    Raises: ValueError when it is not one.
    """
    raw = await http.read()
    if not raw and not required:
        return {}
    try:
        body = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise ValueError(f"the body is not JSON: {error}") from error
    if not isinstance(body, dict):
        raise ValueError(f"the body must be a JSON object, got {type(body).__name__}")
    return body


def field(body: dict[str, Any], name: str, kind: type | tuple[type, ...]) -> Any:
    value = body.get(name)
    if not isinstance(value, kind) or isinstance(value, bool):
        expected = " or ".join(k.__name__ for k in (kind if isinstance(kind, tuple) else (kind,)))
        raise ValueError(f"{name} must be a {expected}, got {value!r}")
    return value


def version_of(body: dict[str, Any]) -> str | None:
    version = body.get("weight_version")
    return None if version is None else str(version)


def json_reply(content: Any, status: int = 200) -> web.Response:
    return web.Response(body=orjson.dumps(content), status=status, content_type="application/json")


def success(message: str) -> web.Response:
    return json_reply({"success": True, "message": message})


@web.middleware
async def errors_as_json(http: web.Request, handler: Callable) -> web.StreamResponse:
    try:
        return await handler(http)
    except (ValueError, UpdateRefused) as error:
        status, message = 400, str(error)
    except EngineDead as error:
        status, message = (503 if http.path.startswith("/health") else 500), str(error)
    except (web.HTTPException, asyncio.CancelledError, ConnectionError):
        raise
    except Exception as error:
        logger.exception("%s failed", http.path)
        status, message = 500, f"{type(error).__name__}: {error}"
    if http.path == "/generate":
        return json_reply({"error": {"message": message}}, status)
    return json_reply({"success": False, "message": message}, status)
