"""What a dynamic filter answers, calling one, and counting what it dropped."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from slime.utils.async_utils import finish
from slime.utils.hook_calls import call_hook, wrong

OPTION = "dynamic_sampling_filter_path"


@dataclass
class DynamicFilterOutput:
    """Whether to keep a group; `keep_when_insufficient` keeps it anyway when dropping would cost new prompts."""

    keep: bool
    reason: str | None = None
    keep_when_insufficient: bool = False


def call_dynamic_filter(fn: Callable | None, *args: Any, **kwargs: Any) -> DynamicFilterOutput:
    """The filter's answer; no filter keeps all, a plain truth value is wrapped."""
    output = True if fn is None else finish(fn(*args, **kwargs))
    return output if isinstance(output, DynamicFilterOutput) else DynamicFilterOutput(keep=bool(output))


def filter_group(args, group: list) -> DynamicFilterOutput:
    """What `--dynamic-sampling-filter-path` says about a group; without one all are kept.

    Raises:
        ValueError: the filter returned no verdict (None, a list), so that nobody knows what it wanted. HookError: it raised.
    """
    if not args.dynamic_sampling_filter_path:
        return DynamicFilterOutput(keep=True)
    output = call_hook(args, OPTION, args, group)
    if isinstance(output, DynamicFilterOutput):
        return output
    if isinstance(output, (bool, int)) or getattr(output, "shape", None) == ():  # the latter of numpy or torch
        return DynamicFilterOutput(keep=bool(output))
    raise wrong(OPTION, args.dynamic_sampling_filter_path, f"returned a {type(output).__name__}")


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
