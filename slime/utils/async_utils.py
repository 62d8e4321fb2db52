"""One background event loop per process, for synchronous code that has to await, and threads for users' plain functions.

Invariants: all coroutines given to `run` share one loop, so sessions and semaphores bound to it stay valid between
calls; a task that calls `sys.exit` does not end the loop under the others. Knows nothing about what it runs.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import inspect
import logging
import os
import threading
from collections.abc import Callable, Coroutine
from typing import Any

logger = logging.getLogger(__name__)

_lock = threading.Lock()
_depth: contextvars.ContextVar[int] = contextvars.ContextVar("slime_hook_depth", default=0)
_loops: dict[tuple[int, str], asyncio.AbstractEventLoop] = {}  # by process and name


def get_background_loop(name: str = "slime-async") -> asyncio.AbstractEventLoop:
    """The loop of this process, started on first use (a forked child gets its own)."""
    with _lock:
        loop = _loops.get((os.getpid(), name))
        if loop is None or loop.is_closed():
            loop = _loops[os.getpid(), name] = asyncio.new_event_loop()
            threading.Thread(target=_serve, args=(loop,), name=name, daemon=True).start()
        return loop


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


async def gather_or_cancel(coroutines: list[Coroutine]) -> list[Any]:
    """Results in order; when one fails the others are cancelled and awaited before the first error is raised."""
    tasks = [asyncio.ensure_future(coroutine) for coroutine in coroutines]
    try:
        if tasks:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        failed = next((t for t in tasks if t.done() and not t.cancelled() and t.exception() is not None), None)
        if failed is not None:
            raise _as_exception(failed.exception())
        return [task.result() for task in tasks]
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _as_exception(error: BaseException) -> BaseException:
    """What a future can carry: `sys.exit` and the like in a user's function are failures of that call."""
    unfit = (SystemExit, KeyboardInterrupt, GeneratorExit, StopIteration, asyncio.CancelledError)
    return RuntimeError(f"the function raised {error!r}") if isinstance(error, unfit) else error


def run(coro: Coroutine[Any, Any, Any]) -> Any:
    """Run a coroutine on the background loop and return its result; an interrupt cancels it."""
    loop = get_background_loop()
    if _running_loop() in _loops.values():
        coro.close()
        raise RuntimeError("async_utils.run was called from the background loop itself; await the coroutine instead")
    return _result_on(loop, coro)


class AsyncLoopThread:
    """The background loop as an object, for code that holds one: `get_async_loop().run(coro)`."""

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        return get_background_loop()

    def run(self, coro: Coroutine[Any, Any, Any]) -> Any:
        return run(coro)


def get_async_loop() -> AsyncLoopThread:
    return AsyncLoopThread()


def finish(result: Any, loop: str | None = None) -> Any:
    """What a user's function gave back; an awaitable is awaited first, wherever this is called from.

    Called inside of a loop (a hook that is asked in the middle of a round), the awaitable runs on a loop beside it, and the round
    stands still meanwhile, as it does for a plain function. A hook that makes another one run gets one more loop.

    Args:
        loop: name of a background loop for it, where the caller holds a lock that a task of the others may wait for.
    """
    if not inspect.isawaitable(result):
        return result
    depth = _depth.get()

    async def wait() -> Any:
        _depth.set(depth + 1)
        return await result

    name = loop or (f"slime-hooks-{depth}" if _running_loop() else "slime-async")
    return _result_on(get_background_loop(name), wait())


def _running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


def _result_on(loop: asyncio.AbstractEventLoop, coro: Coroutine[Any, Any, Any]) -> Any:
    future = asyncio.run_coroutine_threadsafe(coro, loop)
    try:
        return future.result()
    except BaseException:
        future.cancel()
        raise
