"""A function over many items in worker processes, results in order.

Invariants: few chunks are under way at a time, so that an endless iterator is fine; an error of the function is raised here, at its
place in the order; workers end with the iteration. Knows nothing about the items.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout  # not the built-in one before Python 3.11
from concurrent.futures.process import BrokenProcessPool
from typing import Any

CHUNK_ITEMS = 256
CHUNK_DEADLINE_S = 600.0

_shared: tuple = ()


def map_in_processes(function: Callable, items: Iterable, shared: tuple, num_workers: int, flag: str) -> Iterator[Any]:
    """Yield `function(item, *shared)` for each item.

    Args:
        function: of a module, so that workers find it. What fits in one chunk is computed here, without workers.
        shared: sent once to each worker.
        flag: named when a worker ends or hangs.

    Raises: RuntimeError when a worker ended or took longer than the deadline; what the function raises.
    """
    items = iter(items)
    chunk = list(itertools.islice(items, CHUNK_ITEMS))
    following = list(itertools.islice(items, CHUNK_ITEMS))
    if not following:
        yield from (function(item, *shared) for item in chunk)
        return
    context = multiprocessing.get_context("spawn")  # a process with threads cannot be forked
    pool = ProcessPoolExecutor(num_workers, mp_context=context, initializer=_keep, initargs=(shared,))
    under_way: deque[Future] = deque()
    try:
        while chunk:
            under_way.append(pool.submit(_apply, function, chunk))
            if len(under_way) > 2 * num_workers:
                yield from _result(under_way.popleft(), flag)
            chunk, following = following, list(itertools.islice(items, CHUNK_ITEMS))
        while under_way:
            yield from _result(under_way.popleft(), flag)
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def _keep(shared: tuple) -> None:
    global _shared
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    _shared = shared


def _apply(function: Callable, chunk: list) -> list:
    return [function(item, *_shared) for item in chunk]


def _result(future: Future, flag: str) -> list:
    try:
        return future.result(CHUNK_DEADLINE_S)
    except BrokenProcessPool as error:
        raise RuntimeError(f"{flag}: a worker process ended; was it short of memory?") from error
    except FutureTimeout as error:
        raise RuntimeError(f"{flag}: {CHUNK_ITEMS} rows took a worker longer than {CHUNK_DEADLINE_S:.0f} s") from error
