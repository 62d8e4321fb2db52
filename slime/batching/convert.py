"""From a flat list of samples to the train dict: one list per column, one entry per sample.

Always: tokens, response_lengths, rewards, raw_reward, truncated, sample_indices, rollout_ids, loss_masks,
rollout_mask_sums, source_names. When the samples carry them: rollout_log_probs, teacher_log_probs,
rollout_routed_experts, rollout_top_p_token_ids/offsets, metadata, adapters (numbers, when several are trained), round_number, multimodal_train_inputs.

Samples are read, never changed. Values stay plain Python (tensors come in `schedule.split_train_data_by_dp`).
Example: two samples of one prompt with rewards 1 and 0 and no std normalisation ->
{"tokens": [[5, 6, 7], [5, 6, 8]], "response_lengths": [1, 1], "rewards": [0.5, -0.5], "raw_reward": [1, 0],
 "loss_masks": [[1], [1]], "rollout_ids": [0, 1], "rollout_mask_sums": [1, 1], ...}.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import torch

from slime.algorithms.reduce import rollout_mask_sums
from slime.algorithms.rewards import GROUP_RELATIVE, STD_NORMALISED, normalize_group_rewards
from slime.batching.flops import moe_layers
from slime.batching.hook_results import custom_rewards, custom_train_data
from slime.batching.sample_check import check_samples
from slime.utils.sample_adapter import adapter_number
from slime.utils.types import Sample

#: Columns with a number for each response token.
RESPONSE_COLUMNS = ("loss_masks", "rollout_log_probs", "teacher_log_probs", "advantages", "returns")


def convert_samples_to_train_data(args, samples: list[Sample]) -> dict[str, Any]:
    """Convert a flat list of samples; `--custom-convert-samples-to-train-data-path` replaces all of it.

    Raises:
        ValueError: no samples, a sample without reward, or one whose columns do not fit together (named).
    """
    if not samples:
        raise ValueError("the rollout returned no samples to train on")
    if args.custom_convert_samples_to_train_data_path:
        return custom_train_data(args, samples)
    if args.check_samples:
        check_samples(samples, _vocab_size(args.model_arch), args.use_rollout_logprobs or args.use_tis)
    else:
        for sample in samples:
            sample.check_invariants()
    rollout_ids = _rollout_ids(samples)
    raw_rewards, rewards = post_process_rewards(args, samples, rollout_ids)
    loss_masks = [_loss_mask(sample) for sample in samples]
    data: dict[str, Any] = {
        "tokens": [list(sample.tokens) for sample in samples],
        "response_lengths": [sample.response_length for sample in samples],
        "rewards": rewards,
        "raw_reward": _logged_rewards(samples, raw_rewards),
        "truncated": [int(sample.is_truncated) for sample in samples],
        "sample_indices": [sample.index for sample in samples],
        "rollout_ids": rollout_ids,
        "loss_masks": loss_masks,
        "rollout_mask_sums": rollout_mask_sums([sum(mask) for mask in loss_masks], rollout_ids),
        "source_names": [_source_name(sample) for sample in samples],
    }
    data.update(_optional_columns(args, samples, loss_masks))
    return data


def checked_columns(samples: list[Sample], columns: dict[str, list]) -> dict[str, list]:
    """Columns that a loop of the user's gives beside its samples, such as advantages.

    Raises: ValueError for a column without one entry per sample, or whose per-token entries have another length.
    """
    for name, rows in columns.items():
        if len(rows) != len(samples):
            raise ValueError(f"column {name!r} has {len(rows)} entries for {len(samples)} samples")
        if name not in RESPONSE_COLUMNS:
            continue
        for sample, row in zip(samples, rows, strict=True):
            if len(row) != sample.response_length:
                raise ValueError(
                    f"column {name!r} has {len(row)} numbers for sample {sample.index}, whose response has "
                    f"{sample.response_length} tokens"
                )
    return columns


def _vocab_size(arch: dict[str, Any] | None) -> int | None:
    arch = arch or {}
    return (arch.get("text_config") or arch).get("vocab_size")


def post_process_rewards(
    args, samples: list[Sample], rollout_ids: Sequence[int] | None = None
) -> tuple[list[Any], list[float]]:
    """Return (raw rewards, training rewards).

    Group-relative estimators get rewards normalised within each `group_index`, one per rollout id. A sample without a verdict
    (its reward or its generation failed) says nothing about its group: it is left out and gets 0. One that a filter marked
    `remove_sample` counts. `--custom-reward-post-process-path` replaces the whole step.

    Raises:
        ValueError: a sample has no reward, or the hook returned something else.
    """
    if args.custom_reward_post_process_path:
        return custom_rewards(args, samples)
    raw = [_scalar_reward(args, sample) for sample in samples]
    estimator = args.advantage_estimator
    if estimator not in GROUP_RELATIVE or not args.rewards_normalization:
        return raw, list(raw)
    groups = _group_ids(args, samples)
    rollout_ids = _rollout_ids(samples) if rollout_ids is None else rollout_ids
    judged = [position for position, sample in enumerate(samples) if sample.has_verdict]
    normalised = normalize_group_rewards(
        [raw[position] for position in judged],
        [groups[position] for position in judged],
        [rollout_ids[position] for position in judged],
        std_norm=estimator in STD_NORMALISED and args.grpo_std_normalization,
        leave_one_out=estimator == "rloo",
    )
    rewards = [0.0] * len(samples)
    for position, reward in zip(judged, normalised, strict=True):
        rewards[position] = reward
    return raw, rewards


def _scalar_reward(args, sample: Sample) -> float:
    if sample.reward is None:
        raise ValueError(
            f"sample {sample.index} (group {sample.group_index}) has no reward; every sample to train needs one"
        )
    try:
        reward = float(sample.get_reward_value(args))
    except (TypeError, KeyError, ValueError) as error:
        is_dict = isinstance(sample.reward, dict)
        cure = "set it to one of the keys" if is_dict else "a reward is a number without that flag, or a dict with it"
        raise ValueError(
            f"sample {sample.index} (group {sample.group_index}): reward {sample.reward!r} gives no number with "
            f"--reward-key {args.reward_key}; {cure}"
        ) from error
    if not math.isfinite(reward):
        raise ValueError(f"sample {sample.index} (group {sample.group_index}): the reward is {reward}")
    return reward


def _group_ids(args, samples: list[Sample]) -> list[int]:
    """Return the prompt of each sample; samples that never saw a data source are grouped by position."""
    groups = [sample.group_index for sample in samples]
    if all(group is None for group in groups) and len(samples) % args.n_samples_per_prompt == 0:
        return [position // args.n_samples_per_prompt for position in range(len(samples))]
    missing = [position for position, group in enumerate(groups) if group is None]
    if missing:
        raise ValueError(
            f"samples at positions {missing[:8]} have no group_index, so their rewards cannot be compared within a "
            "prompt; set sample.group_index, or use --disable-rewards-normalization"
        )
    return groups


def _rollout_ids(samples: list[Sample]) -> list[int]:
    """Return each sample's rollout id; a missing one becomes the smallest unused integer.

    So does an id that samples of another prompt had before: it counts executions within its prompt.
    """
    used = {sample.rollout_id for sample in samples if sample.rollout_id is not None}
    unused = (candidate for candidate in itertools.count() if candidate not in used)
    owners: dict[int, int | None] = {}
    others: dict[tuple[int | None, int], int] = {}
    ids = []
    for sample in samples:
        own, group = sample.rollout_id, sample.group_index
        if own is None:
            ids.append(next(unused))
        elif owners.setdefault(own, group) == group:
            ids.append(own)
        else:
            if (group, own) not in others:
                others[group, own] = next(unused)
            ids.append(others[group, own])
    return ids


def _loss_mask(sample: Sample) -> list[int]:
    if sample.remove_sample:
        return [0] * sample.response_length
    return [1] * sample.response_length if sample.loss_mask is None else [int(m) for m in sample.loss_mask]


def _logged_rewards(samples: list[Sample], raw_rewards: list[Any]) -> list[Any]:
    """Return the rewards for metrics: `metadata["raw_reward"]` where a sample has it, nan where the reward failed."""
    rewards = []
    for sample, raw in zip(samples, raw_rewards, strict=True):
        metadata = sample.metadata or {}
        rewards.append(metadata.get("raw_reward", math.nan if metadata.get("reward_error") else raw))
    return rewards


def _source_name(sample: Sample) -> str:
    """Return where the sample came from: an attached `source`, the metadata, or "unknown"."""
    attached = vars(sample).get("source")
    return attached or (sample.metadata or {}).get("source_name") or "unknown"


def _optional_columns(args, samples: list[Sample], loss_masks: list[list[int]]) -> dict[str, Any]:
    columns: dict[str, Any] = {}
    for name in ("rollout_log_probs", "teacher_log_probs"):
        if any(getattr(sample, name) is not None for sample in samples):
            columns[name] = _token_column(samples, name, loss_masks)
    if args.use_rollout_routing_replay:
        columns["rollout_routed_experts"] = routed_experts(args, samples, loss_masks)
    if any(sample.train_metadata is not None for sample in samples):
        columns["metadata"] = [sample.train_metadata for sample in samples]
    if len(args.lora_adapters) > 1:
        columns["adapters"] = [adapter_number(sample, args.lora_adapters) for sample in samples]
    if any("round_number" in (sample.metadata or {}) for sample in samples):
        columns["round_number"] = [(sample.metadata or {}).get("round_number", 1) for sample in samples]
    if args.rollout_top_p != 1.0 and args.loss_type != "sft_loss":
        columns.update(_top_p_columns(samples, loss_masks))
    if any(sample.multimodal_train_inputs is not None for sample in samples):
        columns["multimodal_train_inputs"] = [sample.multimodal_train_inputs for sample in samples]
    return columns


def _token_column(samples: list[Sample], name: str, loss_masks: list[list[int]]) -> list[list[float]]:
    """Return a per-token column; only fully masked samples may lack it, they get zeros."""
    column = []
    for sample, mask in zip(samples, loss_masks, strict=True):
        values = getattr(sample, name)
        if values is None and any(mask):
            raise ValueError(f"sample {sample.index} has trained tokens but no {name}, while other samples have them")
        column.append([0.0] * sample.response_length if values is None else values)
    return column


def _top_p_columns(samples: list[Sample], loss_masks: list[list[int]]) -> dict[str, list]:
    """Return what the sampler kept at each response token; only fully masked samples may lack it."""
    ids, offsets = [], []
    for sample, mask in zip(samples, loss_masks, strict=True):
        ends = sample.rollout_top_p_token_offsets
        if ends is None and any(mask):
            raise ValueError(
                f"--rollout-top-p is not 1: sample {sample.index} has no rollout_top_p_token_ids and _offsets. Its engine must "
                "answer custom_params.return_top_p_token_ids (SGLang as released does not), and a generate function of your "
                "own must send the sampling_params that it gets and pass meta_info to append_response_tokens"
            )
        ids.append([] if ends is None else sample.rollout_top_p_token_ids)
        offsets.append([0] * (sample.response_length + 1) if ends is None else ends)
    return {"rollout_top_p_token_ids": ids, "rollout_top_p_token_offsets": offsets}


def routed_experts(args, samples: list[Sample], loss_masks: list[list[int]]) -> list[torch.Tensor]:
    """Return the experts of each sample's tokens as the engine reported them, int16 [at most tokens - 1, layers, top-k].

    Only samples that are not trained may lack them.

    Raises:
        ValueError: names the sample and what is wrong: shape, ids, layers with experts whose ids are all zero (a pipeline
            stage that sent nothing).
    """
    layers = [i for i, is_moe in enumerate(moe_layers(args.moe_layer_freq, args.num_layers)) if is_moe]
    column = []
    for sample, mask in zip(samples, loss_masks, strict=True):
        if sample.rollout_routed_experts is None and not any(mask):
            column.append(torch.zeros(0, args.num_layers, args.moe_router_topk, dtype=torch.int16))
            continue
        if sample.rollout_routed_experts is None:
            raise ValueError(
                f"--use-rollout-routing-replay: sample {sample.index} has no rollout_routed_experts; a generate function "
                "of your own must ask for them (return_routed_experts) and pass meta_info to append_response_tokens"
            )
        experts = torch.as_tensor(sample.rollout_routed_experts)
        problem = _problem_with_experts(args, experts, layers)
        if problem:
            raise ValueError(f"--use-rollout-routing-replay: sample {sample.index} {problem}")
        column.append(experts.to(torch.int16))
    return column


def _problem_with_experts(args, experts: torch.Tensor, layers: list[int]) -> str | None:
    wanted = (args.num_layers, args.moe_router_topk)
    if experts.dim() != 3 or tuple(experts.shape[1:]) != wanted or not len(experts):
        shape = tuple(experts.shape)
        return f"has routed experts of shape {shape}, expected [tokens - 1 >= 1, {wanted[0]}, {wanted[1]}]"
    if int(experts.min()) < 0 or int(experts.max()) >= args.num_experts:
        return f"has expert ids {int(experts.min())}..{int(experts.max())}, the model has {args.num_experts}"
    seen = experts.ne(0).any(dim=2).any(dim=0)
    missing = [layer for layer in layers if not bool(seen[layer])] if args.moe_router_topk > 1 else []
    return f"has only zero expert ids in MoE layers {missing}" if missing else None
