"""Rounds read from rollout dumps while engines stay up, for memory and weight-sync tests of the whole loop.

`--rollout-function-path slime.rollout.forge_load.generate_rollout --load-forge-rollout-data PATH`. A literal path is the same file in
every round, and evaluations are empty; with `{rollout_id}` each round reads its own file, training falls back to round 0,
evaluation reads `eval_<round>`. Samples are taken as they are. To train without engines use `--load-debug-rollout-data`.
"""

from __future__ import annotations

from typing import Any

from slime.observability.debug_dump import dump_path, load_rollout_dump
from slime.rollout.base_types import RolloutFnEvalOutput, RolloutFnTrainOutput
from slime.rollout.eval_rollout import result_of
from slime.utils.misc import group_by
from slime.utils.types import Sample

EVAL_SET = "forge_eval"


def generate_rollout(args, rollout_id, data_source, evaluation=False) -> RolloutFnTrainOutput | RolloutFnEvalOutput:
    """The recorded round.

    Raises:
        RuntimeError: the file is missing.
    """
    template = args.load_forge_rollout_data
    per_round = "{rollout_id}" in template
    if evaluation:
        return RolloutFnEvalOutput(data=_evaluation(args, template, rollout_id) if per_round else {})
    if per_round and not dump_path(template, rollout_id).exists():
        rollout_id = 0
    return RolloutFnTrainOutput(samples=_groups(_read(template, rollout_id)))


def _read(template: str, name: int | str) -> list[Sample]:
    path = dump_path(template, name)
    if not path.exists():
        raise RuntimeError(f"--load-forge-rollout-data: {path} does not exist")
    return load_rollout_dump(template, name)


def _groups(samples: list[Sample]) -> list[list[Sample]]:
    """Samples of one prompt together, in the order of the dump."""
    return list(group_by(samples, lambda s: ("alone", id(s)) if s.group_index is None else s.group_index).values())


def _evaluation(args, template: str, rollout_id: int) -> dict[str, dict[str, Any]]:
    return {EVAL_SET: result_of(args, _read(template, f"eval_{rollout_id}"))}
