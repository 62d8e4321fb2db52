"""One background event loop per process, for synchronous code that has to await.

Invariant: all coroutines given to `run` share one loop, so sessions and semaphores bound to it stay valid between
calls. Knows nothing about what it runs.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Coroutine
from typing import Any

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
            threading.Thread(target=_loop.run_forever, name="slime-async", daemon=True).start()
        return _loop


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
