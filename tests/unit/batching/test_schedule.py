"""Schedule invariants on random batches, and the documented examples."""

from __future__ import annotations

import random
import sys
from types import SimpleNamespace

import pytest
import torch

from slime.batching.balance import karmarkar_karp, longest_first
from slime.batching.schedule import build_dp_schedule, for_one_pass, split_train_data_by_dp


def random_case(seed):
    rng = random.Random(seed)
    num_rollouts = rng.randint(4, 24)
    ids = [r for r in range(num_rollouts) for _ in range(rng.choice([1, 1, 1, 2, 3]))]
    lengths = [rng.randint(1, 60) for _ in ids]
    if seed % 3 == 0:
        order = list(range(len(ids)))
        rng.shuffle(order)
        ids = [ids[i] for i in order]
    return lengths, ids, rng


@pytest.mark.parametrize("seed", range(60))
@pytest.mark.parametrize("balance", ["none", "data", "flops"])
def test_invariants_hold_for_random_batches(seed, balance):
    lengths, ids, rng = random_case(seed)
    dp, cp, vpp_group = rng.choice([1, 2, 4]), rng.choice([1, 2]), rng.choice([1, 2])
    batch_size = rng.randint(max(1, len(set(ids)) // 2), len(set(ids)))
    cap = rng.choice([16, 64, 200])
    kwargs = dict(
        global_batch_size=batch_size, dp_size=dp, cp_size=cp, use_dynamic_batch_size=True, max_tokens_per_gpu=cap,
        balance_data=balance == "data", balance_by_flops=balance == "flops", vpp_size=2,
        microbatch_group_size_per_vp_stage=vpp_group, flops_fn=lambda n: n * n + n,
    )  # fmt: skip
    plan = build_dp_schedule(lengths, ids, **kwargs)
    assert plan == build_dp_schedule(lengths, ids, **kwargs), "the schedule is a pure function"
    kept = [
        position
        for part, fillers in zip(plan.partitions, plan.fillers, strict=True)
        for place, position in enumerate(part)
        if place not in fillers
    ]
    assert len(kept) == len(set(kept)), "a sample is scheduled twice"
    first_seen = list(dict.fromkeys(ids))
    num_steps = len(first_seen) // batch_size
    assert {ids[p] for p in kept} == set(first_seen[: num_steps * batch_size])
    assert len(kept) == sum(i in set(first_seen[: num_steps * batch_size]) for i in ids)
    for part, micro_batches in zip(plan.partitions, plan.micro_batch_indices, strict=True):
        assert len(micro_batches) == sum(plan.num_microbatches)
        assert [i for mb in micro_batches for i in mb] == list(range(len(part)))
        for mb in micro_batches:
            assert mb
            if balance != "flops" and len(mb) > 1:
                assert sum(lengths[part[i]] for i in mb) <= cap * cp
    assert all(count % vpp_group == 0 for count in plan.num_microbatches)
    assert plan.global_batch_sizes == [batch_size] * num_steps


def test_siblings_of_one_rollout_stay_in_one_step():
    ids = [0, 1, 0, 2, 3, 2]
    plan = build_dp_schedule([1] * 6, ids, global_batch_size=2, dp_size=1)
    first, second = plan.num_microbatches
    assert {ids[p] for p in plan.partitions[0][:first]} == {0, 1} and second == 3


def test_fb_a17_oversized_samples_sit_alone_and_the_cap_holds():
    plan = build_dp_schedule(
        [5000], [0], global_batch_size=1, dp_size=1, use_dynamic_batch_size=True, max_tokens_per_gpu=4096
    )
    assert plan.micro_batch_indices == [[[0]]]
    plan = build_dp_schedule(
        [7] * 8, list(range(8)), global_batch_size=8, dp_size=1, use_dynamic_batch_size=True, max_tokens_per_gpu=8
    )
    assert plan.num_microbatches == [8]


def test_errors_name_the_flags():
    with pytest.raises(ValueError, match="--global-batch-size 4"):
        build_dp_schedule([1, 1], [0, 1], global_batch_size=4, dp_size=1)
    with pytest.raises(ValueError, match="--micro-batch-size"):
        build_dp_schedule([1] * 3, [0, 1, 2], global_batch_size=3, dp_size=2)
    with pytest.raises(ValueError, match="data-parallel ranks"):
        build_dp_schedule([1], [0], global_batch_size=1, dp_size=2)


def test_fillers_keep_ranks_busy_when_samples_are_too_few():
    schedule = build_dp_schedule(
        [9, 4, 30], [0, 1, 2], global_batch_size=3, dp_size=4, use_dynamic_batch_size=True, max_tokens_per_gpu=20
    )
    assert schedule.num_microbatches == [1] and all(len(batches) == 1 for batches in schedule.micro_batch_indices)
    assert schedule.fillers == [[], [], [], [0]] and schedule.partitions[3] == [1]
    real = [
        sample
        for samples, fillers in zip(schedule.partitions, schedule.fillers, strict=True)
        for place, sample in enumerate(samples)
        if place not in fillers
    ]
    assert sorted(real) == [0, 1, 2]


def test_fillers_are_masked_copies():
    args = SimpleNamespace(
        global_batch_size=1, micro_batch_size=1, use_dynamic_batch_size=True, max_tokens_per_gpu=8, balance_data=False,
        balance_by_flops=False,
    )  # fmt: skip
    data = {"tokens": [[1, 2, 3]], "loss_masks": [[1, 1]], "rewards": [0.5], "rollout_ids": [7]}
    first, second = split_train_data_by_dp(args, data, 2)
    assert first["fillers"] == [] and first["loss_masks"][0].tolist() == [1, 1]
    assert second["fillers"] == [0] and second["loss_masks"][0].tolist() == [0, 0]
    assert torch.equal(second["tokens"][0], first["tokens"][0])


@pytest.mark.parametrize("seed", range(30))
def test_partitions_cover_every_item_once_and_balance(seed):
    rng = random.Random(seed)
    weights = [rng.randint(1, 100) for _ in range(24)]
    for parts in (longest_first(weights, 4), karmarkar_karp(weights, 4), karmarkar_karp(weights, 4, equal_size=True)):
        assert sorted(item for part in parts for item in part) == list(range(24))
        sums = [sum(weights[i] for i in part) for part in parts]
        assert max(sums) - min(sums) <= max(weights)
    assert all(len(part) == 6 for part in karmarkar_karp(weights, 4, equal_size=True))


def test_work_grows_with_items_and_not_with_items_times_parts():
    """Counted in calls of Python functions, so that the speed of the machine does not matter."""
    calls = []
    weights = [float(i % 37 + i % 11 + 1) for i in range(400)]
    sys.setprofile(lambda frame, event, argument: calls.append(event) if event == "call" else None)
    try:
        parts = karmarkar_karp(weights, 200)
    finally:
        sys.setprofile(None)
    assert sorted(item for part in parts for item in part) == list(range(400))
    assert len(calls) < 40 * len(weights)


@pytest.mark.parametrize("dp_size", [1, 2, 3])
@pytest.mark.parametrize("count", [1, 3, 7])
def test_pass_that_does_not_train_reads_every_sample_in_one_step(count, dp_size):
    args = SimpleNamespace(
        global_batch_size=2, micro_batch_size=1, use_dynamic_batch_size=False, max_tokens_per_gpu=None,
        balance_data=False, balance_by_flops=False,
    )  # fmt: skip
    samples = [SimpleNamespace(tokens=[1] * (2 + i)) for i in range(count)]
    data = {
        "tokens": [sample.tokens for sample in samples],
        "response_lengths": [1] * count,
        "rollout_ids": list(range(count)),
        "loss_masks": [[1]] * count,
        "rollout_mask_sums": [1] * count,
    }
    shards = split_train_data_by_dp(for_one_pass(args, samples), data, dp_size=dp_size)
    trained = [
        position for s in shards for position, mask in zip(s["partition"], s["loss_masks"], strict=True) if mask.any()
    ]
    assert sorted(trained) == list(range(count))
    assert all(shard["global_batch_sizes"] == [count] for shard in shards)


def test_split_gives_each_rank_its_rows_as_tensors():
    args = SimpleNamespace(
        global_batch_size=4, micro_batch_size=1, use_dynamic_batch_size=False, max_tokens_per_gpu=None,
        balance_data=False, balance_by_flops=False,
    )  # fmt: skip
    data = {
        "tokens": [[1, 2], [3, 4, 5], [6, 7], [8, 9]],
        "response_lengths": [1, 2, 1, 1],
        "rewards": [0.5, -0.5, 1.0, -1.0],
        "raw_reward": [1, 0, 1, 0],
        "rollout_ids": [0, 1, 2, 3],
        "loss_masks": [[1], [1, 0], [1], [1]],
        "rollout_mask_sums": [1, 1, 1, 1],
        "rollout_log_probs": [[-0.1], [-0.2, 0.0], [-0.3], [-0.4]],
        "my_own_column": ["a", "b", "c", "d"],
        "note": "whole",
    }
    shards = split_train_data_by_dp(args, data, dp_size=2)
    second = shards[1]
    assert second["partition"] == [1, 3] and second["num_microbatches"] == [2] and second["global_batch_sizes"] == [4]
    assert [row.tolist() for row in second["tokens"]] == [[3, 4, 5], [8, 9]]
    assert second["tokens"][0].dtype == torch.int64 and second["loss_masks"][0].dtype == torch.int32
    assert second["rollout_log_probs"][0].dtype == torch.float32
    assert torch.equal(second["rollout_mask_sums"], torch.tensor([1.0, 1.0]))
    assert second["my_own_column"] == ["b", "d"] and second["note"] == "whole"
    assert second["raw_reward"] == [1, 0, 1, 0] and second["total_lengths"] == [2, 3, 2, 2]
    assert second["rewards"] == [-0.5, -1.0]
