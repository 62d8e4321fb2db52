"""Metrics of one round computed from its samples, under the names that dashboards of the field know.

Invariants: a reward may be None, a number or a dict; one that is no number, or whose computation failed, is left out
instead of counting as 0; a list may be empty; siblings that one execution was split into (same `rollout_id`) count once in pass
rates. A metric without data is absent, never nan.
Lengths named effective count trained tokens only (sum of the loss mask).
It does not know who asks, where the numbers are written, or how the samples were made.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from slime.algorithms.passk import pass_at_k
from slime.algorithms.rewards import STD_FLOOR
from slime.observability.metric_utils import add_prefix, clip_ratio, describe, has_repetition, mean, reward_number
from slime.observability.request_metrics import request_metrics
from slime.utils.meta_info import flat_list
from slime.utils.misc import group_by

if TYPE_CHECKING:
    from slime.utils.types import Sample

_SECTIONS = ("rollout/", "perf/", "eval/", "train/", "passrate/", "multi_turn/", "correct_")


def compute_rollout_metrics(
    args, samples: Sequence[Sample], rollout_time: float, extra: Mapping[str, float] | None = None
) -> dict[str, float]:
    """Return all metrics of a training round under their final names.

    Args:
        samples: the round's samples, groups and fan-outs flattened.
        rollout_time: seconds from the first request to the last kept sample.
        extra: metrics of the rollout function; a name without a section gets the prefix `rollout/`.
    """
    metrics = {name if name.startswith(_SECTIONS) else f"rollout/{name}": v for name, v in (extra or {}).items()}
    metrics |= add_prefix("rollout/", sample_metrics(args, samples))
    if samples:
        metrics["rollout/trained_tokens"] = sum(s.effective_response_length for s in samples if not s.remove_sample)
    if args.debug_rollout_only:  # otherwise the trainer reports the rewards of what it trained on
        metrics |= _mean_reward(args, samples)
    metrics |= add_prefix("perf/", throughput_metrics(args, samples, rollout_time))
    metrics |= add_prefix("perf/", request_metrics(samples))
    if args.log_passrate:
        metrics |= add_prefix("passrate/", pass_at_k(_correct_by_prompt(args.reward_key, samples)))
    if args.log_multi_turn:
        metrics |= add_prefix("multi_turn/", _multi_turn(args, samples))
    if args.log_correct_samples:
        metrics |= _correct_lengths(args, samples)
    return metrics


def compute_eval_metrics(
    args, data: Mapping[str, Mapping], extra: Mapping[str, float] | None = None
) -> dict[str, float]:
    """Return all metrics of one evaluation.

    Args:
        data: by data set name `{"rewards": list, "truncated": list[bool], "samples": list[Sample]}`; a custom evaluation
            may leave out the last two. Samples without a group are taken in runs of the data set's own sample count.
    """
    metrics = {name if name.startswith(_SECTIONS) else f"eval/{name}": v for name, v in (extra or {}).items()}
    key = args.eval_reward_key or args.reward_key
    for name, results in data.items():
        rewards = [reward_number(reward, key) for reward in results.get("rewards") or []]
        scored = [reward for reward in rewards if reward is not None]
        if scored:
            metrics[f"eval/{name}"] = mean(scored)
        if len(scored) < len(rewards):
            metrics[f"eval/{name}-unscored_ratio"] = 1 - len(scored) / len(rewards)
        if results.get("unfinished"):
            metrics[f"eval/{name}-unfinished"] = results["unfinished"]
        if results.get("truncated"):
            metrics[f"eval/{name}-truncated_ratio"] = mean(map(float, results["truncated"]))
        samples = results.get("samples") or []
        metrics |= add_prefix(f"eval/{name}/", sample_metrics(args, samples, key))
        if args.log_passrate:
            groups = _eval_groups(args, name, samples, rewards)
            metrics |= add_prefix(f"eval/{name}-", pass_at_k(groups))
    return metrics


def sample_metrics(args, samples: Sequence[Sample], reward_key: str | None = None) -> dict[str, float]:
    """Return the metrics that training rounds and evaluations share, without prefix.

    Args:
        reward_key: key of a dict reward; None takes `args.reward_key`.
    """
    if not samples:
        return {}
    metrics = describe("response_len", (s.effective_response_length for s in samples))
    if args.advantage_estimator != "ppo":
        metrics |= _zero_std(reward_key or args.reward_key, samples)
    if args.sglang_speculative_algorithm:
        metrics["spec_accept_rate"] = mean(s.spec_info.spec_accept_rate for s in samples)
        metrics["spec_accept_length"] = mean(s.spec_info.spec_accept_length for s in samples)
    metrics |= _prefix_cache(samples)
    metrics |= _reward_categories(args.log_reward_category, samples)
    metrics |= _kept_vocabulary(samples)
    metrics["repetition_frac"] = mean(float(has_repetition(s.response)) for s in samples)
    metrics["truncated_ratio"] = mean(float(s.is_truncated) for s in samples)
    return metrics


def _by_group(samples: Iterable[Sample]) -> dict[int, list[Sample]]:
    return group_by((s for s in samples if s.group_index is not None), lambda sample: sample.group_index)


def _zero_std(reward_key: str | None, samples: Sequence[Sample]) -> dict[str, float]:
    """Count the groups whose rewards are all equal, but for rounding, by that reward rounded to one digit.

    As in the normalisation, a sample without a verdict says nothing about its group.
    """
    counts: Counter[str] = Counter()
    for group in _by_group(samples).values():
        rewards = {reward_number(s.reward, reward_key) for s in group if s.has_verdict} - {None}
        if rewards and max(rewards) - min(rewards) <= STD_FLOOR:
            counts[f"zero_std/count_{round(min(rewards), 1) + 0.0}"] += 1
    return dict(counts)


def _prefix_cache(samples: Sequence[Sample]) -> dict[str, float]:
    cached = sum(s.prefix_cache_info.cached_tokens for s in samples)
    total = sum(s.prefix_cache_info.total_prompt_tokens for s in samples)
    return {
        "prefix_cache_hit_rate": cached / total if total else 0.0,
        "avg_cached_tokens_per_sample": cached / len(samples),
    }


def _reward_categories(category: str | None, samples: Sequence[Sample]) -> dict[str, float]:
    """Return the share of samples per value of the dict reward's entry `category`."""
    if not category:
        return {}
    values = [s.reward[category] for s in samples if isinstance(s.reward, Mapping) and category in s.reward]
    return {f"error_cat/{value}": count / len(samples) for value, count in Counter(map(str, values)).items()}


def _kept_vocabulary(samples: Sequence[Sample]) -> dict[str, float]:
    """Return how many ids the nucleus kept per trained token.

    Example: offsets 0,3,8,10,20 under mask 1,0,1,0 and offsets 0,4,9 without mask give (3+2 + 4+5) / 4 = 3.5.
    """
    kept, tokens = 0, 0
    for sample in samples:
        if sample.rollout_top_p_token_offsets is None or sample.remove_sample:
            continue
        offsets = flat_list(sample.rollout_top_p_token_offsets)
        spans = [end - start for start, end in zip(offsets, offsets[1:], strict=False)]
        mask = sample.loss_mask if sample.loss_mask is not None else [1] * len(spans)
        trained = [span for span, is_trained in zip(spans, mask, strict=False) if is_trained]
        kept += sum(trained)
        tokens += len(trained)
    return {"top_p_kept_vocab_per_token": kept / tokens} if tokens else {}


def throughput_metrics(args, samples: Sequence[Sample], rollout_time: float) -> dict[str, float]:
    """Return the round's time and token rates, once for all tokens and once for trained tokens."""
    metrics = {"rollout_time": float(rollout_time)}
    if not samples or rollout_time <= 0:
        return metrics
    waits = [float(s.non_generation_time) for s in samples]
    if any(wait > 0 for wait in waits):
        metrics |= describe("non_generation_time", waits)
    for infix, lengths in (
        ("", [s.response_length for s in samples]),
        ("effective_", [s.effective_response_length for s in samples]),
    ):
        if args.rollout_num_gpus:
            metrics[f"{infix}tokens_per_gpu_per_sec"] = sum(lengths) / rollout_time / args.rollout_num_gpus
        metrics |= _longest(f"longest_{infix}sample", lengths, waits, rollout_time)
    return metrics


def _longest(name: str, lengths: list[int], waits: list[float], rollout_time: float) -> dict[str, float]:
    """Return token rates of the longest sample, with and without the time it spent outside generation."""
    longest = max(lengths)
    metrics = {f"{name}_tokens_per_sec": longest / rollout_time}
    if any(wait > 0 for wait in waits):
        wait = mean(w for w, length in zip(waits, lengths, strict=True) if length == longest)
        metrics[f"{name}_non_generation_time"] = wait
        if wait < rollout_time:
            metrics[f"{name}_tokens_per_sec_without_non_generation"] = longest / (rollout_time - wait)
    return metrics


def logged_reward(sample: Sample, reward_key: str | None) -> float | None:
    """Return the sample's `metadata["raw_reward"]` or else its reward; None where that is no number, or failed."""
    reward = None if sample.metadata.get("reward_error") else sample.reward
    return reward_number(sample.metadata.get("raw_reward", reward), reward_key)


def _mean_reward(args, samples: Sequence[Sample]) -> dict[str, float]:
    rewards = [logged_reward(sample, args.reward_key) for sample in samples]
    scored = [reward for reward in rewards if reward is not None]
    return {"rollout/raw_reward": mean(scored)} if scored else {}


def _correct_by_prompt(reward_key: str | None, samples: Sequence[Sample]) -> list[list[bool]]:
    """Return for each prompt one flag per execution with a reward; a split execution is correct when one of its parts is."""
    groups = []
    for group in _by_group(samples).values():
        by_execution: dict = {}
        for position, sample in enumerate(group):
            reward = logged_reward(sample, reward_key)
            if reward is not None:
                key = ("alone", position) if sample.rollout_id is None else sample.rollout_id
                by_execution[key] = by_execution.get(key, False) or reward == 1
        groups.append(list(by_execution.values()))
    return groups


def _eval_groups(args, name: str, samples: Sequence[Sample], rewards: list[float | None]) -> list[list[bool]]:
    """Return the correctness flags of an evaluation's prompts, by group index or else by the data set's own count."""
    if samples and all(s.group_index is not None for s in samples):
        return _correct_by_prompt(args.eval_reward_key or args.reward_key, samples)
    counts = {d.name: d.n_samples_per_eval_prompt for d in args.eval_datasets}
    n = counts.get(name) or args.n_samples_per_eval_prompt
    if not n or len(rewards) % n:
        return []
    groups = (rewards[start : start + n] for start in range(0, len(rewards), n))
    return [[reward == 1 for reward in group if reward is not None] for group in groups]


def _multi_turn(args, samples: Sequence[Sample]) -> dict[str, float]:
    """Return lengths with and without tool output, and turn counts."""
    raw = [s.response_length for s in samples]
    without_observations = [s.effective_response_length for s in samples]
    rounds = [float(s.metadata["round_number"]) for s in samples if "round_number" in s.metadata]
    metrics = _mean_max_min("raw_response_length/response_length", raw)
    if raw:
        limit = args.rollout_max_response_len
        metrics["raw_response_length/response_length_clip_ratio"] = clip_ratio(raw, limit) if limit else 0.0
    metrics |= _mean_max_min("wo_obs_response_length/response_length", without_observations)
    return metrics | _mean_max_min("multi_turn_metric/round_number", rounds)


def _mean_max_min(name: str, values: Sequence[float]) -> dict[str, float]:
    if not values:
        return {}
    return {f"{name}_mean": mean(values), f"{name}_max": float(max(values)), f"{name}_min": float(min(values))}


def _correct_lengths(args, samples: Sequence[Sample]) -> dict[str, float]:
    """Return quartiles of the response lengths of correct samples (nearest rank)."""
    lengths = sorted(s.response_length for s in samples if logged_reward(s, args.reward_key) == 1)
    if not lengths:
        return {}
    return {
        f"correct_length/p{p}": float(lengths[max(0, math.ceil(p / 100 * len(lengths)) - 1)]) for p in (25, 50, 75, 100)
    }
