"""Hooks as a user writes them; each notes in `calls` what it was given. `async_twin` makes the same file with async functions."""

import torch

from slime.rollout.base_types import RolloutFnEvalOutput, RolloutFnTrainOutput
from slime.rollout.data_source import RolloutDataSourceWithBuffer
from slime.rollout.filter_hub.base_types import DynamicFilterOutput
from slime.utils.types import Sample

calls = []


def note(name, *arguments):
    calls.append((name, *arguments))


def made(sample, token):
    """A sample with a response of one token."""
    sample.tokens, sample.response, sample.response_length = [1, 2, token], "x", 1
    sample.loss_mask, sample.rollout_log_probs, sample.status = [1], [-0.5], Sample.Status.COMPLETED
    return sample


def rollout_function(args, rollout_id, data_source, evaluation=False):
    note("rollout", rollout_id, type(data_source).__name__, evaluation)
    if evaluation:
        return RolloutFnEvalOutput(
            {"held_out": {"rewards": [1.0], "truncated": [False], "samples": [made(Sample(), 3)]}}
        )
    groups = data_source.get_samples(args.rollout_batch_size)
    for group in groups:
        for sample in group:
            made(sample, 3).reward = float(sample.index)
    return RolloutFnTrainOutput(groups, metrics={"own": 1.0})


def eval_function(args, rollout_id, data_source, evaluation=False):
    note("eval", rollout_id, type(data_source).__name__, evaluation)
    return {"held_out": {"rewards": [1.0, 0.0], "truncated": [False, True]}}


def generate(args, sample, sampling_params, evaluation=False):
    note("generate", sample.index, sampling_params["max_new_tokens"], evaluation)
    return made(sample, 7)


def list_generate(args, samples, evaluation=False):
    note("list_generate", [sample.index for sample in samples], evaluation)
    return [made(sample, 7) for sample in samples]


def sample_hook(args, sample, *, rollout_id=None, evaluation=False):
    note("sample_hook", sample.index, sample.reward, rollout_id, evaluation)


def custom_rm(args, sample, **kwargs):
    note("rm", sample.index, sample.response)
    return float(sample.index % 2)


def group_rm(args, samples, **kwargs):
    note("group_rm", [sample.index for sample in samples])
    return [float(sample.index % 2) for sample in samples]


def dynamic_sampling_filter(args, samples, **kwargs):
    note("filter", [(sample.index, sample.reward) for sample in samples])
    return DynamicFilterOutput(keep=samples[0].group_index != 1, reason="second")


def buffer_filter(args, rollout_id, buffer, num_samples):
    note("buffer_filter", rollout_id, [group[0].group_index for group in buffer], num_samples)
    return [buffer.pop() for _ in range(min(num_samples, len(buffer)))]


def rollout_sample_filter(args, groups):
    note("sample_filter", [[sample.index for sample in group] for group in groups])
    groups[0][0].remove_sample = True


def rollout_all_samples_process(args, all_groups, data_source):
    note("all_samples", [group[0].group_index for group in all_groups], len(data_source.get_samples(1)))


class Prompts(RolloutDataSourceWithBuffer):
    def get_samples(self, num_samples):
        note("get_samples", num_samples)
        return super().get_samples(num_samples)


def reward_post_process(args, samples, **kwargs):
    note("post_process", [sample.index for sample in samples])
    raw = [sample.reward for sample in samples]
    return raw, torch.tensor(raw) - 0.5


def convert_samples_to_train_data(args, samples):
    note("convert", [sample.index for sample in samples])
    return {
        "tokens": [sample.tokens for sample in samples],
        "response_lengths": [sample.response_length for sample in samples],
        "rewards": [sample.reward for sample in samples],
        "raw_reward": [sample.reward for sample in samples],
        "truncated": [0 for _ in samples],
        "sample_indices": [sample.index for sample in samples],
        "loss_masks": [sample.loss_mask for sample in samples],
    }


def rollout_log(rollout_id, args, samples, rollout_extra_metrics, rollout_time):
    note("log", rollout_id, len(samples), rollout_extra_metrics, rollout_time)
    return True


def eval_rollout_log(rollout_id, args, data, extra_metrics):
    note("eval_log", rollout_id, sorted(data), extra_metrics)
    return True


def rollout_data_postprocess(args, rollout_id, rollout_data):
    note("data_postprocess", rollout_id, sorted({"advantages", "log_probs"} & rollout_data.keys()))
    rollout_data["advantages"] = [2 * row for row in rollout_data["advantages"]]


def advantage_function(args, rollout_data):
    note("advantage", "kl" in rollout_data)
    rollout_data["advantages"] = [mask.float() for mask in rollout_data["loss_masks"]]
    rollout_data["returns"] = rollout_data["advantages"]


def estimator(inputs):
    note("estimator", inputs.response_lengths)
    rows = [reward * mask.float() for reward, mask in zip(inputs.rewards, inputs.loss_masks, strict=True)]
    return rows, rows


def loss_function(args, batch, logits, sum_of_sample_mean):
    note("loss", sorted({"tokens", "advantages"} & batch.keys()), tuple(logits.shape))
    return sum_of_sample_mean(logits[0, :2, 0]), {"own": 3.0}


def tis_function(
    args, *, pg_loss, train_log_probs, rollout_log_probs, loss_masks, total_lengths, response_lengths, **kwargs
):
    note("tis", tuple(pg_loss.shape), len(train_log_probs), len(rollout_log_probs), total_lengths, response_lengths)
    return pg_loss * 0.5, loss_masks, {"tis": torch.ones_like(pg_loss)}


def pg_loss_reducer_function(total_lengths, response_lengths, loss_masks, calculate_per_token_loss):
    note("reducer", total_lengths, response_lengths, len(loss_masks), calculate_per_token_loss)
    return lambda tokens: tokens.sum() / 7


def megatron_init(args):
    note("init")


def megatron_before_log_prob_hook(args, model, store_prefix):
    note("before_log_prob", store_prefix)


def megatron_before_train_step_hook(args, rollout_id, step_id, model, optimizer, opt_param_scheduler):
    note("before_step", rollout_id, step_id, type(optimizer).__name__)


def update_weight_post_write(args, version_dir, rollout_engines):
    note("post_write", version_dir, [engine.base_url for engine in rollout_engines])


def model_provider(pre_process, post_process, vp_stage=None):
    note("model_provider", pre_process, post_process, vp_stage)
    model = torch.nn.Linear(2, 2)
    model.output_layer = torch.nn.Linear(2, 2)
    return model


def layer_spec(args, config, vp_stage):
    note("layer_spec", vp_stage)
