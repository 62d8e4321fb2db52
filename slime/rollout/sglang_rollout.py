"""The default rollout function, and the public names of generation.

`generate_rollout` is what `--rollout-function-path` points at by default: it runs one training round
(`train_round`) or one evaluation (`eval_rollout`) on the background loop. The other names are here because users import
them from here.
"""

from __future__ import annotations

from slime.rollout.base_types import RolloutFnEvalOutput, RolloutFnTrainOutput
from slime.rollout.data_source_adapter import as_data_source
from slime.rollout.engine_control import get_model_url
from slime.rollout.eval_rollout import eval_rollout, eval_rollout_single_dataset
from slime.rollout.generate_state import GenerateState
from slime.rollout.generation import generate, generate_and_rm, generate_and_rm_group, sample_params
from slime.rollout.train_round import TrainRound, abort
from slime.utils.async_utils import run

__all__ = [
    "GenerateState",
    "abort",
    "eval_rollout",
    "eval_rollout_single_dataset",
    "generate",
    "generate_and_rm",
    "generate_and_rm_group",
    "generate_rollout",
    "generate_rollout_async",
    "get_model_url",
    "sample_params",
]


async def generate_rollout_async(args, rollout_id: int, data_source) -> RolloutFnTrainOutput:
    """One training round of --rollout-batch-size groups."""
    return await TrainRound(args, rollout_id, as_data_source(args, data_source)).run()


def generate_rollout(args, rollout_id, data_source, evaluation=False) -> RolloutFnTrainOutput | RolloutFnEvalOutput:
    """Generate and score the groups of round `rollout_id`, or evaluate on all held-out sets."""
    if evaluation:
        return run(eval_rollout(args, rollout_id))
    return run(generate_rollout_async(args, rollout_id, data_source))
