"""Around the trainer's steps, on every training rank.

--custom-megatron-init-path examples/hooks/trainer.py:limit_threads
--custom-megatron-before-log-prob-hook-path examples/hooks/trainer.py:before_log_prob
--rollout-data-postprocess-path examples/hooks/trainer.py:clip_advantages
--custom-megatron-before-train-step-hook-path examples/hooks/trainer.py:warm_up
"""

import torch


def limit_threads(args):
    """Once, after Megatron is initialised and before the model is built."""
    torch.set_num_threads(args.omp_num_threads)


def before_log_prob(args, model, store_prefix):
    """Before each forward pass without gradients. `store_prefix`: "" of the policy, "ref_" of the reference, "teacher_".

    `model` is a list: one chunk for each virtual pipeline stage.
    """
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def clip_advantages(args, rollout_id, rollout_data):
    """Once a round, after log-probs and advantages. Columns are lists of a tensor per sample of this data rank."""
    rollout_data["advantages"] = [row.clamp(-2, 2) for row in rollout_data["advantages"]]


def warm_up(args, rollout_id, step_id, model, optimizer, opt_param_scheduler):
    """Before each optimizer step: ten rounds of a smaller learning rate."""
    for group in optimizer.param_groups:
        group["lr"] = args.lr * min(1.0, (rollout_id + 1) / 10)
