"""Fill `advantages`, `returns` and `kl` of a shard, once per rollout, before its optimizer steps.

Wraps `slime.algorithms.advantages` in what needs arguments and process groups: which log-probs the KL is taken from, the
user's advantage function, on-policy distillation, whitening over all data ranks. Runs on the last pipeline stage.
"""

from __future__ import annotations

import torch

from slime.algorithms import advantages, distill
from slime.algorithms.kl import approx_kl
from slime.algorithms.whitening import whiten
from slime.backends.megatron_utils import hook_results


def compute_advantages_and_returns(args, data: dict) -> None:
    """Add the columns to `data`. Collective over data ranks when advantages are whitened.

    Raises: ValueError for missing inputs of the chosen estimator.
    """
    log_probs = data.get("rollout_log_probs" if args.use_rollout_logprobs else "log_probs")
    data["kl"] = _kl(args, data, log_probs)
    if args.custom_advantage_function_path is not None:
        hook_results.advantages(args, data)
    elif "advantages" in data:  # brought by the batch of a user's loop
        data.setdefault("returns", data["advantages"])
    else:
        _estimate(args, data)
    if args.use_opd:
        data["advantages"], reverse_kl = distill.apply_opd(
            data["advantages"], log_probs, data.get("teacher_log_probs"), args.opd_kl_coef
        )
        if reverse_kl is not None:
            data["opd_reverse_kl"] = reverse_kl
    if args.normalize_advantages:
        data["advantages"] = whiten(data["advantages"], data["loss_masks"], _sum_over_data_ranks)


def _kl(args, data: dict, log_probs: list[torch.Tensor] | None) -> list[torch.Tensor]:
    if log_probs is None or "ref_log_probs" not in data:
        lengths = [len(mask) for mask in data["loss_masks"]]
        where = data["loss_masks"][0].device if lengths else None
        return list(torch.zeros(sum(lengths), device=where).split(lengths))
    pairs = zip(log_probs, data["ref_log_probs"], strict=True)
    return [approx_kl(new, reference, args.kl_loss_type) for new, reference in pairs]


def _estimate(args, data: dict) -> None:
    inputs = advantages.AdvantageInputs(
        rewards=data["rewards"],
        response_lengths=data["response_lengths"],
        loss_masks=data["loss_masks"],
        kl=data["kl"],
        values=data.get("values"),
        kl_coef=args.kl_coef,
        gamma=args.gamma,
        lambd=args.lambd,
    )
    data["advantages"], data["returns"] = advantages.compute(args.advantage_estimator, inputs)


def _sum_over_data_ranks(x: torch.Tensor) -> torch.Tensor:
    import torch.distributed as dist
    from megatron.core import parallel_state as mpu

    group = mpu.get_data_parallel_group()
    if group.size() > 1:
        x = x.clone()
        dist.all_reduce(x, group=group)
    return x
