"""Reduce per-step and per-rollout numbers over the data-parallel ranks.

A number travels as (sum, count), so that ranks of different size weigh right. Loss metrics and `rollout/` reports share
their denominators: the rollouts of the step (per-rollout mode) or its tokens (per-token mode), never a micro-batch's.
Names are the public ones: `train/<key>`, `rollout/<key>`. Only the last pipeline stage has numbers.
"""

from __future__ import annotations

import torch

from slime.algorithms.kl import approx_kl
from slime.algorithms.reduce import make_reducer, num_tokens
from slime.backends.megatron_utils.data import real_samples
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
PER_SAMPLE_REPORTS = ("response_lengths", "rewards", "truncated", "round_number")


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
    """Return `rollout/<key>` of the data as it was trained on, the same on every rank of the last stage."""
    data = _with_measured_kl(args, data)
    masks = data["loss_masks"]
    reducer = make_reducer(masks, data.get("rollout_mask_sums"), per_token=args.calculate_per_token_loss)
    real = real_samples(data)
    tokens = num_tokens([masks[i] for i in real]) if args.calculate_per_token_loss else 0
    names, sums = [], []
    for key in PER_TOKEN_REPORTS:
        if key in data:
            names.append(key)
            sums.append(float(reducer(torch.cat(data[key]).float())))
    sample_names = [key for key in PER_SAMPLE_REPORTS if key in data]
    sample_sums = [float(sum(data[key][i] for i in real)) for key in sample_names]
    own_lengths = float(sum(len(data["tokens"][i]) for i in real))
    count = len(real)
    entropies = _entropy_of_correct(args, data, real)
    *totals, correct_entropy, num_correct = sum_over_data_ranks(
        [*sums, *sample_sums, own_lengths, count, tokens, float(sum(entropies)), len(entropies)]
    )
    token_totals, sample_totals = totals[: len(names)], totals[len(names) : -2]
    denominator = totals[-1] if args.calculate_per_token_loss else sum(data["global_batch_sizes"])
    report = {f"rollout/{k}": v / denominator for k, v in zip(names, token_totals, strict=True)}
    report.update(
        {f"rollout/{k}": v / totals[-2] for k, v in zip((*sample_names, "total_lengths"), sample_totals, strict=True)}
    )
    if data.get("raw_reward"):
        report["rollout/raw_reward"] = sum(data["raw_reward"]) / len(data["raw_reward"])
    if num_correct:
        report["correct_entropy"] = correct_entropy / num_correct
    return report


def _entropy_of_correct(args, data: dict, real: list[int]) -> list[float]:
    """Return the mean entropy per trained token of each of this rank's correct samples, where entropies were measured."""
    if not args.log_correct_samples or "entropy" not in data or not data.get("raw_reward"):
        return []
    means = []
    for i in real:
        mask = data["loss_masks"][i]
        if data["raw_reward"][data["partition"][i]] == 1 and mask.any():
            means.append(float((data["entropy"][i].float() * mask).sum() / mask.sum()))
    return means
