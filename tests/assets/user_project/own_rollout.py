"""A whole rollout function and a conversion of one's own, async where the framework's are not."""

import asyncio

from events import note

from slime.rollout.base_types import RolloutFnEvalOutput, RolloutFnTrainOutput
from slime.rollout.sglang_rollout import GenerateState, generate_and_rm_group


async def generate_rollout(args, rollout_id, data_source, evaluation=False):
    note(args, "rollout", rollout_id, evaluation)
    if evaluation:
        return RolloutFnEvalOutput(data={"own_set": {"rewards": [0.5], "truncated": [False], "samples": []}})
    state = GenerateState(args)
    groups = data_source.get_samples(args.rollout_batch_size)
    params = state.sampling_params
    groups = await asyncio.gather(*(generate_and_rm_group(args, group, params.copy()) for group in groups))
    return RolloutFnTrainOutput(samples=list(groups), metrics={"rollout/own": 1.0})


async def reward(args, samples, **kwargs):
    return [float(sample.response_length % 2) for sample in samples]


async def convert(args, samples):
    note(args, "convert", len(samples))
    return {
        "tokens": [sample.tokens for sample in samples],
        "response_lengths": [sample.response_length for sample in samples],
        "rewards": [sample.reward for sample in samples],
        "raw_reward": [sample.reward for sample in samples],
        "truncated": [int(sample.status == sample.Status.TRUNCATED) for sample in samples],
        "sample_indices": [sample.index for sample in samples],
        "loss_masks": [sample.loss_mask for sample in samples],
    }
