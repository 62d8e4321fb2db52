"""Named wall-clock timers of one process, reported as `perf/<name>_time`.

Invariants: a name may be timed several times between two reports, its seconds add up; the same name cannot be nested in
itself (an assertion); a block that raises is timed too. It does not know ranks, steps or trackers.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from slime.utils.misc import SingletonMeta


class Timers:
    """Seconds by name. Example: `with timers("train"): ...`, then `tracker.log(timers.pop_metrics(), ...)`."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter):
        self._clock = clock
        self._started: dict[str, float] = {}
        self._seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Time the block under `name`."""
        self.start(name)
        try:
            yield
        finally:
            self.stop(name)

    def start(self, name: str) -> None:
        """Begin timing `name`."""
        assert name not in self._started, f"timer {name!r} is already running"
        self._started[name] = self._clock()

    def stop(self, name: str) -> None:
        """Add the seconds since `start(name)` to `name`."""
        assert name in self._started, f"timer {name!r} was never started"
        self.add(name, self._clock() - self._started.pop(name))

    def add(self, name: str, seconds: float) -> None:
        """Add seconds that were measured elsewhere."""
        self._seconds[name] = self._seconds.get(name, 0.0) + seconds

    def seconds(self, name: str) -> float:
        """Return the finished seconds of `name` since the last report; 0.0 for an unused name."""
        return self._seconds.get(name, 0.0)

    def pop_metrics(self) -> dict[str, float]:
        """Return `perf/<name>_time` of every finished timer and forget them; running timers go on."""
        metrics = {f"perf/{name}_time": seconds for name, seconds in self._seconds.items()}
        self._seconds = {}
        return metrics


def step_time_metrics(wait_s: float, train_s: float) -> dict[str, float]:
    """Return `perf/train_wait_time`, `perf/step_time` (waiting plus training) and `perf/wait_time_ratio`."""
    step_s = wait_s + train_s
    ratio = wait_s / step_s if step_s > 0 else 0.0
    return {"perf/train_wait_time": wait_s, "perf/step_time": step_s, "perf/wait_time_ratio": ratio}


# ---- for users' functions ----------------------------------------------------------------------------------------------


class Timer(Timers, metaclass=SingletonMeta):
    """The timers of this process that users' functions start; they are reported with the round."""

    end = Timers.stop


def timer(name_or_function: str | Callable):
    """`with timer("judge"): ...`, `@timer("judge")`, or `@timer` under the function's name: adds to `perf/judge_time`."""
    if callable(name_or_function):
        return _timed(name_or_function.__name__)(name_or_function)
    return _timed(name_or_function)


@contextmanager
def _timed(name: str) -> Iterator[None]:
    began = time.perf_counter()
    try:
        yield
    finally:
        Timer().add(name, time.perf_counter() - began)


@contextmanager
def inverse_timer(name: str) -> Iterator[None]:
    """Stop the running timer `name` for the block."""
    Timer().stop(name)
    try:
        yield
    finally:
        Timer().start(name)
