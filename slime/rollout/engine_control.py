"""Talking to the engines behind the router: their list, aborting what they run, their load.

Invariant: an engine that does not answer is a warning, never the end of the round. Knows the endpoints, not samples.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Any

from slime.utils import http_utils
from slime.utils.engine_client import count_requests

logger = logging.getLogger(__name__)

CONTROL_TIMEOUT_S = 10.0
POLL_S = 0.2
DRAIN_TIMEOUT_S = 120.0


def get_model_url(args, model_name: str = "default", endpoint: str = "/generate") -> str:
    """URL of `endpoint` at the router of a named model; the default router for other names."""
    routers = args.sglang_model_routers or {}
    ip, port = routers.get(model_name) or (args.sglang_router_ip, args.sglang_router_port)
    return f"http://{http_utils.format_host(ip)}:{port}{endpoint}"


async def worker_urls(args) -> list[str]:
    """Engines behind all routers of the run."""
    routers = {
        (args.sglang_router_ip, args.sglang_router_port),
        *map(tuple, (args.sglang_model_routers or {}).values()),
    }
    urls: list[str] = []
    for ip, port in sorted(routers, key=str):
        try:
            body = await http_utils.get(
                f"http://{http_utils.format_host(ip)}:{port}/workers", deadline_s=CONTROL_TIMEOUT_S
            )
            urls += [worker["url"] for worker in body["workers"] if worker["url"] not in urls]
        except (RuntimeError, KeyError, TypeError) as error:
            logger.warning("cannot list the engines of router %s:%s: %s", ip, port, error)
    return urls


async def abort_all(args) -> None:
    """Abort everything on every engine and wait until they run nothing."""
    await asyncio.gather(*(_abort_worker(url) for url in await worker_urls(args)))


async def _abort_worker(url: str) -> None:
    deadline = time.monotonic() + DRAIN_TIMEOUT_S
    load: Any = None
    while time.monotonic() < deadline:
        try:
            await http_utils.post(
                f"{url}/abort_request", {"abort_all": True}, max_retries=2, deadline_s=CONTROL_TIMEOUT_S
            )
        except RuntimeError as error:
            logger.warning("engine %s did not take the abort: %s", url, error)
            return
        try:
            load = count_requests(await http_utils.get(f"{url}/v1/loads?include=core", deadline_s=CONTROL_TIMEOUT_S))
        except RuntimeError as error:
            logger.warning("engine %s does not tell its load, not waiting for it: %s", url, error)
            return
        if not load:
            return
        await asyncio.sleep(POLL_S)
    logger.warning("engine %s still runs %s requests %.0f s after the abort", url, load, DRAIN_TIMEOUT_S)
