"""What a round took and said: seconds by phase, and the metrics of all ranks as one."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field


@dataclass
class RoundReport:
    """What the console says about a round when it ends."""

    metrics: dict[str, float] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)


@contextmanager
def timed(phase: str, *totals: dict[str, float]) -> Iterator[None]:
    """Add the wall time of the block to the phase's seconds in each of `totals`."""
    started = time.monotonic()
    try:
        yield
    finally:
        add_seconds(phase, time.monotonic() - started, *totals)


def add_seconds(phase: str, seconds: float, *totals: dict[str, float]) -> None:
    for known in totals:
        known[phase] = known.get(phase, 0.0) + seconds


def merged(reports: list[dict]) -> tuple[dict[int, dict[str, float]], dict[str, float]]:
    """(metrics by step, metrics of the round) of what ranks and roles reported; of equal names the last one's count."""
    steps: dict[int, dict[str, float]] = {}
    rollout: dict[str, float] = {}
    for report in reports:
        rollout |= report.get("rollout", {})
        for step, metrics in report.get("steps", {}).items():
            steps.setdefault(step, {}).update(metrics)
    return steps, rollout
