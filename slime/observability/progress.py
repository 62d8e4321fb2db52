"""Counters of one running round, written by many threads and tasks, read as one plain dict.

Invariants: every call is atomic; a phase begins at `set_total` (which forgets its earlier counts) or at its first `add`;
`snapshot()` holds only str, int, float, None and dicts, so that it can cross a process border.
It does not know what a phase means, who renders it, or how often.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass
class _Phase:
    started_at: float
    changed_at: float
    done: int = 0
    total: int | None = None
    counters: dict[str, float] = field(default_factory=dict)

    def elapsed_s(self, now: float) -> float:
        is_finished = self.total is not None and self.done >= self.total
        return max(0.0, (self.changed_at if is_finished else now) - self.started_at)


class Progress:
    """Thread-safe progress of a round.

    Example: `p.set_total("generate", 8); p.add("generate", tokens=512, reward_sum=1.0, rewards=1)`. The console knows
    the counters `tokens` (generated tokens), `reward_sum` and `rewards` (number of scored samples); others are free.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        self._lock = threading.Lock()
        self._phases: dict[str, _Phase] = {}
        self._current: str | None = None

    def __getstate__(self) -> dict:
        """Leave the lock behind, so that an owner of a Progress stays picklable."""
        return {key: value for key, value in self.__dict__.items() if key != "_lock"}

    def __setstate__(self, state: dict) -> None:
        self.__dict__.update(state)
        self._lock = threading.Lock()

    def set_total(self, phase: str, total: int | None) -> None:
        """Begin `phase` anew with `total` units of work (None when nobody knows)."""
        with self._lock:
            now = self._clock()
            self._phases[phase] = _Phase(started_at=now, changed_at=now, total=total)
            self._current = phase

    def add(self, phase: str, n: int = 1, **counters: float) -> None:
        """Count `n` finished units of `phase` and add each of `counters` to its sum."""
        with self._lock:
            now = self._clock()
            entry = self._phases.setdefault(phase, _Phase(started_at=now, changed_at=now))
            entry.done += n
            entry.changed_at = now
            for name, value in counters.items():
                entry.counters[name] = entry.counters.get(name, 0) + value
            self._current = phase

    def snapshot(self) -> dict:
        """Return `{"phase": last touched phase or None, "phases": {name: {done, total, elapsed_s, counters}}}`."""
        with self._lock:
            now = self._clock()
            return {
                "phase": self._current,
                "phases": {
                    name: {
                        "done": phase.done,
                        "total": phase.total,
                        "elapsed_s": phase.elapsed_s(now),
                        "counters": dict(phase.counters),
                    }
                    for name, phase in self._phases.items()
                },
            }
