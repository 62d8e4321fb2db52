"""What a round took and said: seconds by phase, and the metrics of all ranks as one."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field


@dataclass
class RoundReport:
    """What the console says about a round when it ends."""

    metrics: dict[str, float] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)


@contextmanager
def timed(phase: str, known: dict[str, float]) -> Iterator[None]:
    """Add the wall time of the block to the phase's seconds."""
    started = time.monotonic()
    try:
        yield
    finally:
        add_seconds(phase, time.monotonic() - started, known)


def add_seconds(phase: str, seconds: float, known: dict[str, float]) -> None:
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


def untrained_text(rollout_id: int, generated: Mapping[str, float]) -> str | None:
    """The warning about a round whose generation left nothing to train on, None when nothing is to be said."""
    if generated.get("rollout/trained_tokens") != 0:
        return None
    return (
        f"WARNING round {rollout_id}: no token of its samples counts in the loss, so its gradient is zero. Loss masks are all 0 "
        "(--mask-offpolicy-in-partial-rollout masks what older weights wrote, also finished samples of the Data Buffer), or "
        "samples were taken out (failed rewards, --rollout-sample-filter-path)"
    )
