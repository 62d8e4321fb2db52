"""What a dynamic filter answers, calling one, and counting what it dropped."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass
class DynamicFilterOutput:
    """Whether to keep a group; `keep_when_insufficient` keeps it anyway when dropping would cost new prompts."""

    keep: bool
    reason: str | None = None
    keep_when_insufficient: bool = False


def call_dynamic_filter(fn: Callable | None, *args: Any, **kwargs: Any) -> DynamicFilterOutput:
    """The filter's answer; no filter keeps all, a plain bool is wrapped."""
    if fn is None:
        return DynamicFilterOutput(keep=True)
    output = fn(*args, **kwargs)
    return output if isinstance(output, DynamicFilterOutput) else DynamicFilterOutput(keep=bool(output))


class MetricGatherer:
    """Counts dropped groups by reason.

    Example: two `on_dynamic_filter_drop("zero_std_1.0")` give `{"rollout/dynamic_filter/drop_zero_std_1.0": 2}`.
    """

    def __init__(self) -> None:
        self._dropped: Counter[str] = Counter()

    def on_dynamic_filter_drop(self, reason: str | None) -> None:
        if reason:
            self._dropped[reason] += 1

    def collect(self) -> dict[str, int]:
        return {f"rollout/dynamic_filter/drop_{reason}": count for reason, count in self._dropped.items()}
