"""What a rollout function returns, and calling one in its present or legacy form.

Knows the shapes only; how samples are generated or trained is elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from slime.utils.async_utils import finish
from slime.utils.hook_calls import naming, wrong
from slime.utils.misc import load_hook
from slime.utils.provenance import name_source
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
    output = finish(fn(*args, evaluation=evaluation, **kwargs))
    if not isinstance(output, (RolloutFnTrainOutput, RolloutFnEvalOutput)):
        output = RolloutFnEvalOutput(data=output) if evaluation else RolloutFnTrainOutput(samples=output)
    if not evaluation and isinstance(output, RolloutFnTrainOutput):
        check_rollout_ids(output.samples)
    return output


def call_rollout_path(
    args, option: str, rollout_id: int, data_source: Any, evaluation: bool
) -> RolloutFnTrainOutput | RolloutFnEvalOutput:
    """Call the function of `--rollout-function-path` or `--eval-function-path` and look at what it returns.

    Raises:
        ValueError: it returned something else than the round or the evaluation. HookError: it raised.
    """
    path = getattr(args, option)
    function = load_hook(path, option)
    with naming(option, path):
        output = call_rollout_fn(function, args, rollout_id, data_source, evaluation=evaluation)
    if isinstance(output, RolloutFnTrainOutput) and isinstance(output.samples, list):
        output.samples = [group for group in output.samples if leaves_of(group)]  # an empty one has nothing to train
    content = output.data if isinstance(output, RolloutFnEvalOutput) else output.samples
    problem = _problem_with_eval(output, content) if evaluation else _problem_with_round(output, content)
    if problem:
        raise wrong(option, path, f"returned {problem} in {'evaluation' if evaluation else 'round'} {rollout_id}")
    if not evaluation and not path.startswith("slime."):
        for sample in leaves_of(content):
            name_source(sample, path)
    return output


def _problem_with_round(output: Any, samples: Any) -> str | None:
    if not isinstance(output, RolloutFnTrainOutput) or not isinstance(samples, list):
        return f"a {type(samples).__name__}"
    if not samples:
        return "no groups"
    others = [leaf for leaf in leaves_of(samples) if not isinstance(leaf, Sample)]
    return f"a {type(others[0]).__name__} among the samples" if others else None


def _problem_with_eval(output: Any, data: Any) -> str | None:
    if not isinstance(output, RolloutFnEvalOutput) or not isinstance(data, dict):
        return f"a {type(data).__name__}"
    for name, result in data.items():
        if not isinstance(result, dict) or not isinstance(result.get("rewards"), list | tuple):
            return f"no list of rewards for the set {name!r}"
        for column in ("truncated", "samples"):
            count = len(result.get(column) or [])
            if count and count != len(result["rewards"]):
                return f"{len(result['rewards'])} rewards and {count} {column} for the set {name!r}"
    return None


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
