"""The loop of train.py in one's own hands: generate, reward, advantage, train, sync.

python examples/own_loop/loop.py --hf-checkpoint MODEL --prompt-data data.jsonl ...   (all flags of train.py)
"""

import asyncio

from slime.algorithms.rewards import normalize_group_rewards
from slime.cli import run_command
from slime.config import parse_args
from slime.ray.session import Session
from slime.rollout.sglang_rollout import GenerateState, generate, sample_params
from slime.utils.async_utils import run as wait_for


async def generate_all(args, rollout_id, samples):
    """Let the engines continue every sample; tokens, log-probs and weight versions are in the samples afterwards."""
    state = GenerateState(args)
    state.rollout_id = rollout_id  # sampling seeds follow it

    async def one(sample):
        async with state.semaphore:
            await generate(args, sample, sample_params(args, state, sample, state.sampling_params))

    await asyncio.gather(*map(one, samples))


def reward(args, sample):
    """The share of the label's characters that the response has."""
    return sum(character in sample.response for character in sample.label) / len(sample.label)


def advantages_of(samples):
    """GRPO: the reward relative to the other samples of the prompt, on every token of the response."""
    rewards = [sample.reward for sample in samples]
    relative = normalize_group_rewards(rewards, [sample.group_index for sample in samples], std_norm=True)
    return [[value] * sample.response_length for sample, value in zip(samples, relative, strict=True)]


def train(args):
    with Session(args) as run:  # engines, router, trainer and Data Buffer are up inside, gone outside
        run.update_weights()
        for rollout_id in run.rounds():
            samples = run.prompts(rollout_id)
            wait_for(generate_all(args, rollout_id, samples))
            for sample in samples:
                sample.reward = reward(args, sample)
            advantages = advantages_of(samples)
            run.train(rollout_id, run.batch(rollout_id, samples, advantages=advantages))
            if run.save_due(rollout_id):
                run.save(rollout_id)
            run.update_weights()
            run.end_round(rollout_id)


if __name__ == "__main__":
    run_command(lambda: train(parse_args()))
