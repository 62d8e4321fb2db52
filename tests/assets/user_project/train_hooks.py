"""Hooks of the trainer, in the forms that projects on this framework use."""

import torch
from events import note


def init(args):
    note(args, "megatron_init")


def model_provider(pre_process=True, post_process=True, vp_stage=None, args=None):
    from slime.backends.megatron_utils.model_provider import gpt_model

    note(args, "model_provider", pre_process, post_process)
    model = gpt_model(args, pre_process, post_process, vp_stage)
    model.decoder.final_layernorm.weight.requires_grad = False
    return model


def before_log_prob(args, model, store_prefix):
    note(args, "before_log_prob", store_prefix, type(model).__name__)


def before_train_step(args, rollout_id, step_id, model, optimizer, opt_param_scheduler):
    note(args, "before_train_step", rollout_id, step_id)


def advantage(args, rollout_data):
    note(args, "advantage", sorted({"rewards", "log_probs", "kl"} & set(rollout_data)))
    rollout_data["advantages"] = [
        torch.full_like(log_probs, reward)
        for log_probs, reward in zip(rollout_data["log_probs"], rollout_data["rewards"], strict=False)
    ]
    rollout_data["returns"] = rollout_data["advantages"]


def postprocess(args, rollout_id, rollout_data):
    note(args, "postprocess", rollout_id, sorted({"advantages", "log_probs"} & set(rollout_data)))
    rollout_data["advantages"] = [row.clamp(-1, 1) for row in rollout_data["advantages"]]


def tis(args, *, pg_loss, train_log_probs, rollout_log_probs, loss_masks, **kwargs):
    note(args, "tis", len(loss_masks))
    ratio = torch.exp(torch.cat(train_log_probs) - torch.cat(rollout_log_probs))
    weights = torch.clamp(ratio, max=args.tis_clip)
    return pg_loss * weights, loss_masks, {"own_tis": ratio}


def pg_reducer(total_lengths, response_lengths, loss_masks, calculate_per_token_loss):
    masks = torch.cat([mask.float() for mask in loss_masks])
    return lambda x: (x * masks).sum() / 100
