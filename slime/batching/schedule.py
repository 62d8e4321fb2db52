"""Cut a batch into optimizer steps, micro-batches and data-parallel ranks.

`build_dp_schedule` is a pure function of lengths and rollout ids:
    1. group samples by rollout id (first-seen order); a step is exactly `global_batch_size` rollouts, the incomplete
       tail is dropped;
    2. pack each step once, globally, into micro-batches;
    3. make their number a multiple of dp_size (and of the virtual-pipeline group): dynamic ones are split, and when each
       holds one sample, fillers are added;
    4. hand them to the ranks.
Invariants: every kept sample exactly once; all ranks have the same number of micro-batches in each step; the token cap
holds except for a sample that exceeds it alone; a rank's micro-batch indices, flattened, are 0..n-1.
A filler is the shortest sample of the step once more, fully masked and left out of every count, so that a rank has work.

`split_train_data_by_dp` applies a schedule to the train dict of `convert.py`.
"""

from __future__ import annotations

import argparse
import itertools
import logging
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from slime.batching.balance import karmarkar_karp, longest_first
from slime.batching.flops import ModelShape, sample_flops

logger = logging.getLogger(__name__)

Bins = list[list[int]]


@dataclass(frozen=True)
class DpSchedule:
    """Who trains what, when.

    partitions[rank]: positions (into the batch) of the rank's samples, in training order.
    micro_batch_indices[rank]: one list per micro-batch with indices into that rank's partition.
    num_microbatches[step], global_batch_sizes[step]: per optimizer step, equal on all ranks.
    fillers[rank]: places in the rank's partition that only keep the rank busy.

    Example: lengths 100, 200, 300 with cap 300 on one rank -> partitions [[0, 1, 2]],
    micro_batch_indices [[[0, 1], [2]]], num_microbatches [2].
    """

    partitions: list[list[int]]
    micro_batch_indices: list[Bins]
    num_microbatches: list[int]
    global_batch_sizes: list[int]
    fillers: list[list[int]]


def build_dp_schedule(
    lengths: Sequence[int],
    rollout_ids: Sequence[Hashable],
    *,
    global_batch_size: int,
    dp_size: int,
    cp_size: int = 1,
    micro_batch_size: int = 1,
    use_dynamic_batch_size: bool = False,
    max_tokens_per_gpu: int | None = None,
    balance_data: bool = False,
    balance_by_flops: bool = False,
    vpp_size: int = 1,
    microbatch_group_size_per_vp_stage: int = 1,
    flops_fn: Callable[[int], float] | None = None,
) -> DpSchedule:
    """Build the schedule.

    Args:
        lengths: total tokens of each sample.
        rollout_ids: trajectory of each sample; samples of one trajectory stay in one step.
        flops_fn: cost of a sample of given length; None: its length.
    Raises:
        ValueError: fewer rollouts than one step, or counts that cannot be divided into micro-batches of fixed size.
    """
    cost = [float((flops_fn or float)(length)) for length in lengths]
    divisor = dp_size * (microbatch_group_size_per_vp_stage if vpp_size > 1 else 1)
    partitions: list[list[int]] = [[] for _ in range(dp_size)]
    micro_batches: list[Bins] = [[] for _ in range(dp_size)]
    fillers: list[list[int]] = [[] for _ in range(dp_size)]
    counts = []
    steps = _cut_steps(rollout_ids, global_batch_size)
    for step, samples in enumerate(steps):
        if use_dynamic_batch_size:
            if not max_tokens_per_gpu:
                raise ValueError("--use-dynamic-batch-size needs --max-tokens-per-gpu")
            bins = _pack(samples, lengths, cost, max_tokens_per_gpu * cp_size, balance_by_flops)
            bins = _split_until_divisible(bins, lengths, divisor)
            shortest = min(samples, key=lambda s: lengths[s])
            bins += [[~shortest] for _ in range(-len(bins) % divisor)]  # a filler is the complement of its sample
        else:
            bins = [samples[i : i + micro_batch_size] for i in range(0, len(samples), micro_batch_size)]
            _require_divisible(len(bins), divisor, step, len(samples), micro_batch_size)
        counts.append(len(bins) // dp_size)
        for rank, owned in enumerate(_assign(bins, cost, dp_size, balance_data or balance_by_flops)):
            for micro_batch in owned:
                start = len(partitions[rank])
                micro_batches[rank].append(list(range(start, start + len(micro_batch))))
                fillers[rank].extend(start + i for i, sample in enumerate(micro_batch) if sample < 0)
                partitions[rank].extend(max(sample, ~sample) for sample in micro_batch)
    return DpSchedule(partitions, micro_batches, counts, [global_batch_size] * len(steps), fillers)


def _cut_steps(rollout_ids: Sequence[Hashable], global_batch_size: int) -> Bins:
    """Return the sample positions of each step, in batch order."""
    order: dict[Hashable, int] = {}
    for rollout in rollout_ids:
        order.setdefault(rollout, len(order))
    num_steps = len(order) // global_batch_size
    if num_steps == 0:
        raise ValueError(
            f"the batch holds {len(order)} rollouts, fewer than --global-batch-size {global_batch_size}: no step to train"
        )
    dropped = len(order) - num_steps * global_batch_size
    if dropped:
        logger.warning("%d trailing rollouts do not fill a step of %d and are dropped", dropped, global_batch_size)
    steps: Bins = [[] for _ in range(num_steps)]
    for position, rollout in enumerate(rollout_ids):
        step = order[rollout] // global_batch_size
        if step < num_steps:
            steps[step].append(position)
    return steps


def first_fit(lengths: Sequence[int], cap: int) -> Bins:
    """Pack items in order into the first bin with room; an item above the cap sits alone.

    >>> first_fit([100, 200, 300], 300)
    [[0, 1], [2]]
    """
    bins: Bins = []
    totals: list[int] = []
    for item, length in enumerate(lengths):
        for position, total in enumerate(totals):
            if total + length <= cap:
                bins[position].append(item)
                totals[position] += length
                break
        else:
            bins.append([item])
            totals.append(length)
    return bins


def _pack(samples: list[int], lengths: Sequence[int], cost: Sequence[float], cap: int, by_flops: bool) -> Bins:
    local_lengths = [lengths[s] for s in samples]
    if by_flops:
        num_bins = min(len(samples), -(-sum(local_lengths) // cap))
        bins = [part for part in karmarkar_karp([cost[s] for s in samples], num_bins) if part]
    else:
        bins = first_fit(local_lengths, cap)
    return [[samples[item] for item in part] for part in bins]


def _split_until_divisible(bins: Bins, lengths: Sequence[int], divisor: int) -> Bins:
    """Split the heaviest bin that has several samples, until the count is a multiple of the divisor or none has."""
    bins = list(bins)
    while len(bins) % divisor:
        splittable = [i for i, part in enumerate(bins) if len(part) > 1]
        if not splittable:
            break
        heaviest = max(splittable, key=lambda i: (sum(lengths[s] for s in bins[i]), -i))
        part = bins[heaviest]
        first, second = longest_first([lengths[s] for s in part], 2)
        bins[heaviest] = [part[i] for i in first]
        bins.append([part[i] for i in second])
    return bins


def _require_divisible(num_bins: int, divisor: int, step: int, num_samples: int, micro_batch_size: int) -> None:
    if num_bins % divisor:
        raise ValueError(
            f"step {step}: {num_samples} samples in micro-batches of --micro-batch-size {micro_batch_size} give "
            f"{num_bins} micro-batches, not a multiple of {divisor} (data-parallel ranks x virtual-pipeline group); "
            "change the batch size or use --use-dynamic-batch-size"
        )


def _assign(bins: Bins, cost: Sequence[float], dp_size: int, balance: bool) -> list[Bins]:
    if not balance:
        return [bins[rank::dp_size] for rank in range(dp_size)]
    weights = [sum(cost[max(s, ~s)] for s in part) for part in bins]
    return [[bins[i] for i in part] for part in karmarkar_karp(weights, dp_size, equal_size=True)]


WHOLE_KEYS = ("raw_reward", "total_lengths")
"""Columns that every rank receives for the whole batch."""

TENSOR_DTYPES = {
    "tokens": torch.int64,
    "loss_masks": torch.int32,
    "rollout_log_probs": torch.float32,
    "teacher_log_probs": torch.float32,
    "advantages": torch.float32,
    "returns": torch.float32,
    "rollout_top_p_token_ids": torch.int32,
    "rollout_top_p_token_offsets": torch.int32,
}


def split_train_data_by_dp(
    args,
    train_data: dict[str, Any],
    dp_size: int,
    cp_size: int = 1,
    vpp_size: int = 1,
    microbatch_group_size_per_vp_stage: int = 1,
) -> list[dict[str, Any]]:
    """Return one dict per data-parallel rank.

    Columns with one entry per sample are cut by the rank's partition, unknown ones included; WHOLE_KEYS and values that
    are not such columns travel whole. Ragged columns become CPU tensors (TENSOR_DTYPES), `rollout_mask_sums` one float32
    tensor. Added: partition, global_batch_sizes, num_microbatches, micro_batch_indices, fillers (their masks are zero).
    """
    num_samples = len(train_data["tokens"])
    total_lengths = [len(row) for row in train_data["tokens"]]
    schedule = build_dp_schedule(
        total_lengths,
        train_data.get("rollout_ids", range(num_samples)),
        global_batch_size=args.global_batch_size,
        dp_size=dp_size,
        cp_size=cp_size,
        micro_batch_size=args.micro_batch_size,
        use_dynamic_batch_size=args.use_dynamic_batch_size,
        max_tokens_per_gpu=args.max_tokens_per_gpu,
        balance_data=args.balance_data,
        balance_by_flops=args.balance_by_flops,
        vpp_size=vpp_size,
        microbatch_group_size_per_vp_stage=microbatch_group_size_per_vp_stage,
        flops_fn=_flops_fn(args) if args.balance_data or args.balance_by_flops else None,
    )
    columns = dict(train_data, total_lengths=total_lengths)
    return [_rank_payload(columns, num_samples, schedule, rank) for rank in range(dp_size)]


def for_one_pass(args, samples: Sequence[Any]) -> argparse.Namespace:
    """Arguments that lay these samples, any number of them, out as one step, for a pass that does not train."""
    longest = max(len(sample.tokens) for sample in samples)
    cap = args.max_tokens_per_gpu or longest * args.micro_batch_size
    step = {"global_batch_size": len(samples), "use_dynamic_batch_size": True, "max_tokens_per_gpu": cap}
    return argparse.Namespace(**{**vars(args), **step})


def _flops_fn(args) -> Callable[[int], float]:
    shape = ModelShape.from_args(args)
    return lambda length: sample_flops(length, shape)


def _rank_payload(columns: dict[str, Any], num_samples: int, schedule: DpSchedule, rank: int) -> dict[str, Any]:
    partition = schedule.partitions[rank]
    payload: dict[str, Any] = {}
    for key, value in columns.items():
        per_sample = isinstance(value, (list, tuple)) and len(value) == num_samples
        if key in WHOLE_KEYS or not per_sample:
            payload[key] = value
        elif key == "rollout_mask_sums":
            payload[key] = torch.tensor([float(value[i]) for i in partition], dtype=torch.float32)
        else:
            payload[key] = _tensor_column(key, [value[i] for i in partition])
    payload.update(
        partition=list(partition),
        global_batch_sizes=list(schedule.global_batch_sizes),
        num_microbatches=list(schedule.num_microbatches),
        micro_batch_indices=schedule.micro_batch_indices[rank],
        fillers=schedule.fillers[rank],
    )
    for place in schedule.fillers[rank]:
        payload["loss_masks"][place] = torch.zeros_like(payload["loss_masks"][place])
    return payload


def _tensor_column(key: str, rows: list) -> list:
    """The rows as tensors where the column is one; lists of numbers are read in one go and cut into views."""
    if key in TENSOR_DTYPES and rows and all(type(row) is list for row in rows):
        flat = torch.tensor(list(itertools.chain.from_iterable(rows)), dtype=TENSOR_DTYPES[key])
        return list(flat.split([len(row) for row in rows]))
    if key == "multimodal_train_inputs":
        return _media_column(rows)
    return [_tensorise(key, row) for row in rows]


def _tensorise(key: str, value: Any) -> Any:
    if key in TENSOR_DTYPES:
        return _cpu_tensor(value, TENSOR_DTYPES[key])
    if key == "rollout_routed_experts":
        return _cpu_tensor(value, None)
    return value


def _media_column(rows: list[dict | None]) -> list[dict | None]:
    """Train inputs with tensors for arrays; what several samples share stays one object, which is pickled once."""
    tensors = {id(item): _cpu_tensor(item, None) for row in rows for item in (row or {}).values() if _is_array(item)}
    return [row and {name: tensors.get(id(item), item) for name, item in row.items()} for row in rows]


def _is_array(value: Any) -> bool:
    return isinstance(value, torch.Tensor) or hasattr(value, "__array_interface__")


def _cpu_tensor(value: Any, dtype: torch.dtype | None) -> torch.Tensor:
    """Return a detached contiguous CPU tensor; read-only arrays are copied."""
    if not isinstance(value, torch.Tensor) and _is_array(value):
        value = torch.from_numpy(value if value.flags.writeable else value.copy())
    return torch.as_tensor(value, dtype=dtype, device="cpu").detach().contiguous()
