"""Reduce per-step and per-rollout numbers over the data-parallel ranks.

A number travels as (sum, count), so that ranks of different size weigh right. Loss metrics and `rollout/` reports share
their denominators: the rollouts of the step (per-rollout mode) or its tokens (per-token mode), never a micro-batch's.
Names are the public ones: `train/<key>`, `rollout/<key>`. Only the last pipeline stage has numbers.
"""

from __future__ import annotations

import torch

from slime.algorithms.kl import approx_kl
from slime.algorithms.reduce import make_reducer, num_tokens
from slime.backends.megatron_utils.data import of_own_samples, real_samples
from slime.observability.metric_utils import reward_number
from slime.utils import device

PER_TOKEN_REPORTS = (
    "advantages",
    "returns",
    "log_probs",
    "ref_log_probs",
    "rollout_log_probs",
    "teacher_log_probs",
    "values",
    "kl",
    "entropy",
    "opd_reverse_kl",
)
EXACT_WITHOUT_SKIPPED = ("loss", "pg_loss")
"""Step metrics to which a sample without advantage adds nothing; the others are means over the computed samples."""
PER_SAMPLE_REPORTS = ("response_lengths", "truncated", "round_number")


def sum_over_data_ranks(values: list[float]) -> list[float]:
    """Return the elementwise sum over data-parallel ranks (float64); context ranks all have the numbers of whole samples."""
    import torch.distributed as dist
    from megatron.core import parallel_state as mpu

    group = mpu.get_data_parallel_group()
    if group.size() == 1 or not values:
        return [float(v) for v in values]
    total = torch.tensor(values, dtype=torch.float64, device=device.device())
    dist.all_reduce(total, group=group)
    return total.tolist()


def step_metrics(
    args, sums: dict[str, float], tokens: float, global_batch_size: int, weights: tuple[float, float] = (0.0, 0.0)
) -> dict[str, float]:
    """Return the step's metrics from this rank's sums over micro-batches; all data ranks call it with equal keys.

    Args:
        weights: denominators (of the computed samples, of all) where samples without advantage were skipped.
    """
    names = sorted(sums)
    *totals, num, computed, everything = sum_over_data_ranks([*(sums[name] for name in names), tokens, *weights])
    denominator = num if args.calculate_per_token_loss else global_batch_size
    rescale = everything / computed if computed else 1.0
    return {
        name: total / denominator * (1.0 if name in EXACT_WITHOUT_SKIPPED else rescale)
        for name, total in zip(names, totals, strict=True)
    }


def _with_measured_kl(args, data: dict) -> dict:
    """Return the data with the KL of old policy and reference, or without one where it cannot be measured.

    The estimators' own column holds zeros when nobody needed the log-probs before the steps.
    """
    log_probs = data.get("rollout_log_probs" if args.use_rollout_logprobs else "log_probs")
    reference = data.get("ref_log_probs")
    others = {key: value for key, value in data.items() if key != "kl"}
    if "kl" not in data or log_probs is None or reference is None:
        return others
    return others | {"kl": [approx_kl(a, b, args.kl_loss_type) for a, b in zip(log_probs, reference, strict=True)]}


def rollout_metrics(args, data: dict) -> dict[str, float]:
    """Return `rollout/<key>` of the data as it was trained on, the same on every rank of the last stage.

    Means over tokens have the loss's denominators, so that a round and its steps say the same; means of rewards leave out samples
    without one.
    """
    data = _with_measured_kl(args, data)
    real = real_samples(data)
    raw_rewards = [reward_number(reward, args.reward_key) for reward in data.get("raw_reward") or []]
    if args.loss_type == "sft_loss" and not any(raw_rewards):  # rows of SFT have no reward, their samples hold a 0
        raw_rewards = [None] * len(raw_rewards)
    own_rewards = of_own_samples(data, raw_rewards)
    judged = [i for i in real if own_rewards is None or own_rewards[i] is not None]
    means = {name: (total, "tokens") for name, total in _token_totals(args, data).items()}
    means |= {key: (sum(data[key][i] for i in real), "samples") for key in PER_SAMPLE_REPORTS if key in data}
    means["rewards"] = (sum(data["rewards"][i] for i in judged), "judged")
    means["total_lengths"] = (sum(len(data["tokens"][i]) for i in real), "samples")
    entropies = _entropy_of_correct(args, data, real, own_rewards)
    means["correct_entropy"] = (sum(entropies), "correct")
    tokens = num_tokens([data["loss_masks"][i] for i in real]) if args.calculate_per_token_loss else 0
    counts = {"tokens": tokens, "samples": len(real), "judged": len(judged), "correct": len(entropies)}
    totals = sum_over_data_ranks([*(float(total) for total, _ in means.values()), *counts.values()])
    counts = dict(zip(counts, totals[len(means) :], strict=True))
    if not args.calculate_per_token_loss:
        counts["tokens"] = sum(data["global_batch_sizes"])
    report = {
        name if name == "correct_entropy" else f"rollout/{name}": total / counts[kind]
        for (name, (_, kind)), total in zip(means.items(), totals, strict=False)
        if counts[kind]
    }
    numbers = [reward for reward in raw_rewards if reward is not None]
    if numbers:
        report["rollout/raw_reward"] = sum(numbers) / len(numbers)
    return report


def _token_totals(args, data: dict) -> dict[str, float]:
    """Return this rank's sums of per-token columns: of the rollouts' means, or of trained tokens."""
    reducer = make_reducer(data["loss_masks"], data.get("rollout_mask_sums"), per_token=args.calculate_per_token_loss)
    return {key: float(reducer(torch.cat(data[key]).float())) for key in PER_TOKEN_REPORTS if key in data}


def _entropy_of_correct(args, data: dict, real: list[int], own_rewards: list | None) -> list[float]:
    """Return the mean entropy per trained token of each of this rank's correct samples, where entropies were measured."""
    if not args.log_correct_samples or "entropy" not in data or own_rewards is None:
        return []
    means = []
    for i in real:
        mask = data["loss_masks"][i]
        if own_rewards[i] == 1 and mask.any():
            means.append(float((data["entropy"][i].float() * mask).sum() / mask.sum()))
    return means
