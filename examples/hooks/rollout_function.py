"""A whole round, your way.  --rollout-function-path examples/hooks/rollout_function.py

Both functions may be async. With `--eval-function-path examples/hooks/rollout_function.py:eval_function` evaluations go elsewhere.
"""

import asyncio

from slime.rollout.base_types import RolloutFnEvalOutput, RolloutFnTrainOutput
from slime.rollout.sglang_rollout import GenerateState, eval_rollout, generate_and_rm_group


async def generate_rollout(args, rollout_id, data_source, evaluation=False):
    """All groups of a round at once, nothing filtered. Metrics are optional."""
    if evaluation:
        return await eval_rollout(args, rollout_id)
    state = GenerateState(args)
    state.rollout_id = rollout_id  # sampling seeds follow it
    prompts = data_source.get_samples(args.rollout_batch_size)
    groups = await asyncio.gather(
        *(generate_and_rm_group(args, group, dict(state.sampling_params)) for group in prompts)
    )
    longest = max(sample.response_length for group in groups for sample in group)
    return RolloutFnTrainOutput(list(groups), metrics={"longest_response": longest})


async def eval_function(args, rollout_id, data_source, evaluation=True):
    """The built-in evaluation, its scores rounded. Per set: rewards, and optionally truncated and samples."""
    data = (await eval_rollout(args, rollout_id)).data
    for result in data.values():
        result["rewards"] = [round(reward, 1) for reward in result["rewards"]]
    return RolloutFnEvalOutput(data)
