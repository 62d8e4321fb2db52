"""Hooks of the Data Buffer and of the end of a round, in the forms that projects on this framework use."""

import statistics

import torch
from events import note

from slime.rollout.data_source import RolloutDataSourceWithBuffer
from slime.rollout.filter_hub.base_types import DynamicFilterOutput
from slime.utils import logging_utils
from slime.utils.metric_utils import compute_rollout_step, compute_statistics, dict_add_prefix
from slime.utils.timer import timer
from slime.utils.types import Sample


class EasyFirst(RolloutDataSourceWithBuffer):
    """The file's prompts, the buffered ones first."""

    def get_samples(self, num_samples: int) -> list[list[Sample]]:
        samples = super().get_samples(num_samples)
        note(self.args, "get_samples", num_samples)
        return samples


def pop_shortest(args, rollout_id, buffer: list[list[Sample]], num_samples: int) -> list[list[Sample]]:
    note(args, "buffer_filter", rollout_id)
    buffer.sort(key=lambda group: len(group[0].prompt))
    num_to_pop = min(len(buffer), num_samples)
    samples = buffer[:num_to_pop]
    del buffer[:num_to_pop]
    return samples


@timer("own_filter")
def check_spread(args, samples: list[Sample], **kwargs):
    rewards = [sample.get_reward_value(args) for sample in samples]
    note(args, "dynamic_filter", samples[0].group_index)
    keep = torch.tensor(rewards, dtype=torch.float).std() > 0.0
    return DynamicFilterOutput(keep=keep, reason=None if keep else f"zero_std_{round(rewards[0], 1)}")


def remove_long(args, data):
    note(args, "sample_filter", len(data))
    for group in data:
        limit = statistics.median(sample.response_length for sample in group)
        for sample in group:
            sample.remove_sample = sample.response_length > 2 * limit


def look_at_all(args, all_samples, data_source):
    note(args, "all_samples", len(all_samples), callable(data_source))


def mark(args, sample, *, rollout_id=None, evaluation=False):
    note(args, "sample_hook", sample.index, rollout_id, evaluation)
    sample.metadata["marked"] = True


async def replace(args, sample):
    return Sample.from_dict(sample.to_dict())


def reward_post_process(args, samples: list[Sample], **kwargs):
    raw_rewards = [sample.get_reward_value(args) for sample in samples]
    note(args, "post_process", len(samples), all(sample.metadata["marked"] for sample in samples))
    rewards = torch.tensor(raw_rewards, dtype=torch.float).reshape(-1, args.n_samples_per_prompt)
    rewards = rewards - rewards.mean(dim=-1, keepdim=True)
    return raw_rewards, rewards.flatten().tolist()


def log_rollout(rollout_id, args, samples, rollout_extra_metrics, rollout_time):
    note(args, "log", rollout_id, len(samples), rollout_time > 0)
    lengths = compute_statistics([sample.effective_response_length for sample in samples])
    metrics = dict_add_prefix(lengths, "own/length/") | {"rollout/step": compute_rollout_step(args, rollout_id)}
    logging_utils.log(args, metrics, step_key="rollout/step")
    return False


def log_eval(rollout_id, args, data, extra_metrics):
    note(args, "eval_log", rollout_id, sorted(data))
    return False


def evaluate(args, rollout_id, data_source, evaluation=False):
    """--eval-function-path"""
    assert evaluation
    note(args, "eval", rollout_id)
    return {"own_set": {"rewards": [1.0, 0.0], "truncated": [False, False], "samples": []}}
