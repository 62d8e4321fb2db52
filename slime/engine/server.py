"""Build one engine from its flags and serve it until told to stop.

The port is taken before the model is read, so a clash shows at once. Ends within two seconds of SIGTERM or SIGINT,
whatever the engine thread is waiting for.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import sys

from slime.engine.model_config import load_model_config
from slime.engine.server_args import ServerArgs
from slime.utils.misc import settle_garbage_collection

logger = logging.getLogger(__name__)

SHUTDOWN_S = 1.0


def serve(args: ServerArgs) -> int:
    """Run the engine; returns the exit code."""
    logging.basicConfig(
        level=args.log_level.upper(), format="[%(asctime)s] %(name)s - %(message)s", datefmt="%Y-%m-%d %H:%M:%S"
    )
    logging.getLogger("aiohttp.server").setLevel(logging.CRITICAL)  # routers probe with protocols that it reports
    try:
        if not args.is_embedding:
            load_model_config(args.model_path)  # refuse a wrong model before torch is loaded
        listener = _bind(args.host, args.port)
        asyncio.run(_serve(args, listener))
    except (ValueError, OSError) as error:
        print(f"slime engine: error: {error}", file=sys.stderr)
        return 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # the engine thread may sit in a collective that no one will finish


async def _serve(args: ServerArgs, listener: socket.socket) -> None:
    from aiohttp import web

    loop = asyncio.get_running_loop()
    application, start = _build(args, loop)
    stopped = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopped.set)
    runner = web.AppRunner(application, access_log=None, handler_cancellation=True, shutdown_timeout=SHUTDOWN_S / 2)
    await runner.setup()
    settle_garbage_collection()
    start()
    await web.SockSite(runner, listener, backlog=4096).start()
    logger.info("serving %s at http://%s:%d", args.model_path, args.host, args.port)
    await stopped.wait()
    logger.info("stopping")
    try:
        await asyncio.wait_for(runner.cleanup(), SHUTDOWN_S)
    except asyncio.TimeoutError:
        logger.warning("open connections did not end within %g s", SHUTDOWN_S)


def _build(args: ServerArgs, loop: asyncio.AbstractEventLoop) -> tuple:
    """Return the aiohttp application, and what starts its work once the sockets are set up."""
    if args.is_embedding:
        from slime.engine.reward_api import RewardApi

        return RewardApi(args).application(), lambda: None
    from slime.engine import http_api
    from slime.engine.build import build_engine

    engine = build_engine(args, lambda events: loop.call_soon_threadsafe(http_api.dispatch, events))
    return engine.application(), engine.scheduler.start


def _bind(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise OSError(f"--port {port}: cannot listen on {host}:{port}: {error.strerror}") from error
    return listener
