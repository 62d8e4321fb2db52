"""One background event loop per process, for synchronous code that has to await, and threads for users' plain functions.

Invariants: all coroutines given to `run` share one loop, so sessions and semaphores bound to it stay valid between
calls; a task that calls `sys.exit` does not end the loop under the others. Knows nothing about what it runs.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import logging
import os
import threading
from collections.abc import Callable, Coroutine
from typing import Any

logger = logging.getLogger(__name__)

_lock = threading.Lock()
_loop: asyncio.AbstractEventLoop | None = None
_owner_pid: int | None = None


def get_background_loop() -> asyncio.AbstractEventLoop:
    """The loop of this process, started on first use (a forked child gets its own)."""
    global _loop, _owner_pid
    with _lock:
        if _loop is None or _loop.is_closed() or _owner_pid != os.getpid():
            _loop = asyncio.new_event_loop()
            _owner_pid = os.getpid()
            threading.Thread(target=_serve, args=(_loop,), name="slime-async", daemon=True).start()
        return _loop


def _serve(loop: asyncio.AbstractEventLoop) -> None:
    """Run the loop until it is stopped. asyncio leaves `run_forever` when a task exits; the other tasks still need it."""
    while True:
        try:
            loop.run_forever()
            return
        except (SystemExit, KeyboardInterrupt) as error:
            logger.warning("a task of the background loop raised %r", error)


async def run_in_thread(function: Callable, *arguments: Any, **keywords: Any) -> Any:
    """Await a plain function in a thread of its own.

    Unlike a pool, where calls that hang take the threads of all later ones, a call that is given up costs one idle
    thread, which ends with the process.
    """
    loop, context = asyncio.get_running_loop(), contextvars.copy_context()
    future = loop.create_future()

    def settle(outcome: Callable, value: Any) -> None:
        if not future.done():
            outcome(value)

    def call() -> None:
        try:
            answer = (future.set_result, context.run(function, *arguments, **keywords))
        except BaseException as error:
            answer = (future.set_exception, _as_exception(error))
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(settle, *answer)

    threading.Thread(target=call, name=f"slime-{getattr(function, '__name__', 'call')}", daemon=True).start()
    return await future


def _as_exception(error: BaseException) -> Exception:
    """What a future can carry: `sys.exit` and StopIteration in a user's function are failures of that call."""
    if isinstance(error, Exception) and not isinstance(error, StopIteration):
        return error
    return RuntimeError(f"the function raised {error!r}")


def run(coro: Coroutine[Any, Any, Any]) -> Any:
    """Run a coroutine on the background loop and return its result; an interrupt cancels it."""
    loop = get_background_loop()
    try:
        running = asyncio.get_running_loop()
    except RuntimeError:
        running = None
    if running is loop:
        coro.close()
        raise RuntimeError("async_utils.run was called from the background loop itself; await the coroutine instead")
    future = asyncio.run_coroutine_threadsafe(coro, loop)
    try:
        return future.result()
    except BaseException:
        future.cancel()
        raise
