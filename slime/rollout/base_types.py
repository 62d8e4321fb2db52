"""What a rollout function returns, and calling one in its present or legacy form.

Knows the shapes only; how samples are generated or trained is elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from slime.utils.types import Sample


@dataclass
class RolloutFnTrainOutput:
    """Groups of one training round. A leaf list of several samples is one execution split into parts."""

    samples: list[list[Sample]]
    metrics: dict[str, Any] | None = None


@dataclass
class RolloutFnEvalOutput:
    """Per data set: `{"rewards": list[float], "truncated": list[bool], "samples": list[Sample]}`."""

    data: dict[str, dict[str, Any]]
    metrics: dict[str, Any] | None = None


def call_rollout_fn(
    fn: Callable, *args: Any, evaluation: bool, **kwargs: Any
) -> RolloutFnTrainOutput | RolloutFnEvalOutput:
    """Call a rollout function; a bare list (train) or dict (eval) is wrapped, training output is checked."""
    output = fn(*args, evaluation=evaluation, **kwargs)
    if not isinstance(output, (RolloutFnTrainOutput, RolloutFnEvalOutput)):
        output = RolloutFnEvalOutput(data=output) if evaluation else RolloutFnTrainOutput(samples=output)
    if not evaluation:
        check_rollout_ids(output.samples)
    return output


def check_rollout_ids(samples: list, path: str = "samples", depth: int = 0) -> None:
    """Assert that parts split from one execution (leaf lists at depth 2 and more) share a rollout_id that is set."""
    if not isinstance(samples, list):
        return
    leaves = [item for item in samples if not isinstance(item, list)]
    if depth >= 2 and len(leaves) > 1:
        ids = [leaf.rollout_id for leaf in leaves]
        assert None not in ids and len(set(ids)) == 1, (
            f"{path}: {len(leaves)} samples split from one execution have rollout_id {ids}; all must carry the same one"
        )
    for position, item in enumerate(samples):
        check_rollout_ids(item, f"{path}[{position}]", depth + 1)


def leaves_of(item: Any) -> list[Sample]:
    """All samples of a sample or of arbitrarily nested lists, in order."""
    if isinstance(item, list):
        return [leaf for part in item for leaf in leaves_of(part)]
    return [item]
