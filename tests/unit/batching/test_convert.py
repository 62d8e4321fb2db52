"""Samples to train columns: masks, ids, rewards, and errors that name the sample."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch

from slime.batching.convert import checked_columns, convert_samples_to_train_data
from slime.utils.types import Sample


def make_args(**changes):
    values = dict(
        reward_key=None, advantage_estimator="grpo", rewards_normalization=True, grpo_std_normalization=False,
        n_samples_per_prompt=2, custom_reward_post_process_path=None, custom_convert_samples_to_train_data_path=None,
        rollout_top_p=1.0, use_rollout_routing_replay=False, num_layers=2, num_experts=4,
        moe_router_topk=2, moe_layer_freq=1,
        check_samples=True, model_arch={"vocab_size": 100}, use_rollout_logprobs=False, use_tis=False,
        lora_adapters=["actor"], loss_type="policy_loss",
    )  # fmt: skip
    return SimpleNamespace(**{**values, **changes})


def make_sample(index=0, group=0, reward=1.0, response=2, **changes):
    fields = dict(
        group_index=group, index=index, tokens=list(range(3 + response)), response_length=response, reward=reward,
        status=Sample.Status.COMPLETED,
    )  # fmt: skip
    return Sample(**{**fields, **changes})


def test_samples_name_their_adapter_when_several_are_trained():
    samples = [make_sample(i, metadata={"lora": name}) for i, name in enumerate("abba")]
    data = convert_samples_to_train_data(make_args(lora_adapters=["a", "b"]), samples)
    assert data["adapters"] == [0, 1, 1, 0]
    assert "adapters" not in convert_samples_to_train_data(make_args(), samples)
    samples[2].metadata = {}
    with pytest.raises(ValueError, match=r"sample 2 has to name its adapter in metadata\['lora'\], one of a, b"):
        convert_samples_to_train_data(make_args(lora_adapters=["a", "b"]), samples)


def test_kept_tokens_travel_and_only_untrained_samples_may_lack_them():
    kept = dict(rollout_top_p_token_ids=torch.tensor([4, 9, 4]), rollout_top_p_token_offsets=torch.tensor([0, 2, 3]))
    samples = [make_sample(0, **kept), make_sample(1, remove_sample=True)]
    data = convert_samples_to_train_data(make_args(rollout_top_p=0.9), samples)
    assert data["rollout_top_p_token_ids"][0].tolist() == [4, 9, 4] and data["rollout_top_p_token_ids"][1] == []
    assert data["rollout_top_p_token_offsets"][1] == [0, 0, 0]
    samples[1].remove_sample = False
    with pytest.raises(ValueError, match="--rollout-top-p is not 1: sample 1 has no rollout_top_p_token_ids"):
        convert_samples_to_train_data(make_args(rollout_top_p=0.9), samples)
    assert "rollout_top_p_token_ids" not in convert_samples_to_train_data(
        make_args(rollout_top_p=0.9, loss_type="sft_loss"), samples
    )


def test_missing_masks_and_ids_are_filled():
    samples = [
        make_sample(0, reward=1.0),
        make_sample(1, reward=0.0, rollout_id=0, loss_mask=[0, 1]),
        make_sample(2, group=1, remove_sample=True, status=Sample.Status.TRUNCATED),
        make_sample(3, group=1, metadata={"source_name": "web"}),
    ]
    data = convert_samples_to_train_data(make_args(), samples)
    assert data["loss_masks"] == [[1, 1], [0, 1], [0, 0], [1, 1]]
    assert data["rollout_ids"] == [1, 0, 2, 3]
    assert data["rollout_mask_sums"] == [2, 1, 0, 2]
    assert data["truncated"] == [0, 0, 1, 0]
    assert data["rewards"] == [0.5, -0.5, 0.0, 0.0] and data["raw_reward"] == [1.0, 0.0, 1.0, 1.0]
    assert data["source_names"] == ["unknown", "unknown", "unknown", "web"]
    assert "rollout_log_probs" not in data and "round_number" not in data


def test_fan_out_counts_once_and_shares_its_denominator():
    samples = [make_sample(i, reward=1.0, rollout_id=7) for i in range(3)] + [make_sample(3, reward=0.0, rollout_id=8)]
    data = convert_samples_to_train_data(make_args(), samples)
    assert data["rewards"] == [0.5, 0.5, 0.5, -0.5]
    assert data["rollout_mask_sums"] == [6, 6, 6, 2]


def test_different_sibling_rewards_fail_only_under_normalisation():
    samples = [make_sample(0, reward=1.0, rollout_id=7), make_sample(1, reward=0.0, rollout_id=7)]
    with pytest.raises(ValueError, match="rows 0 and 1"):
        convert_samples_to_train_data(make_args(), samples)
    assert convert_samples_to_train_data(make_args(advantage_estimator="ppo"), samples)["rewards"] == [1.0, 0.0]


def test_raw_reward_override_and_reward_key():
    samples = [
        make_sample(0, reward={"acc": 1, "len": 3}, metadata={"raw_reward": 9}),
        make_sample(1, reward={"acc": 0}),
    ]
    data = convert_samples_to_train_data(make_args(reward_key="acc"), samples)
    assert data["raw_reward"] == [9, 0.0] and data["rewards"] == [0.5, -0.5]
    with pytest.raises(ValueError, match="--reward-key None; set it to one of the keys"):
        convert_samples_to_train_data(make_args(), samples)
    numbers = [make_sample(0, reward=1.0), make_sample(1, reward=0.0)]
    with pytest.raises(ValueError, match="--reward-key acc; a reward is a number without that flag"):
        convert_samples_to_train_data(make_args(reward_key="acc"), numbers)


def test_failed_reward_is_no_number_for_metrics_unless_a_raw_one_stands_beside_it():
    failed = {"reward_error": "TimeoutError: no reward"}
    samples = [make_sample(0, reward=1.0), make_sample(1, reward=0.0, metadata=failed)]
    samples += [make_sample(2, reward=0.0, metadata=failed | {"raw_reward": 0.25})]
    samples[1].metadata["was_truncated"] = True
    data = convert_samples_to_train_data(make_args(), samples)
    logged = data["raw_reward"]
    assert data["truncated"] == [0, 1, 0]
    assert (logged[0], logged[2]) == (1.0, 0.25) and math.isnan(logged[1])


def test_missing_reward_or_broken_columns_name_the_sample():
    with pytest.raises(ValueError, match="sample 4 .* no reward"):
        convert_samples_to_train_data(make_args(), [make_sample(4, reward=None)])
    with pytest.raises(ValueError, match="sample 5"):
        convert_samples_to_train_data(make_args(), [make_sample(5, loss_mask=[1])])
    with pytest.raises(ValueError, match="sample 1 .*rollout_log_probs"):
        convert_samples_to_train_data(make_args(), [make_sample(0, rollout_log_probs=[0.0, 0.0]), make_sample(1)])
    with pytest.raises(ValueError, match="positions \\[1\\] have no group_index"):
        convert_samples_to_train_data(make_args(), [make_sample(0), make_sample(1, group=None)])


def test_mixed_round_numbers_and_removed_samples_without_log_probs():
    samples = [
        make_sample(0, rollout_log_probs=[-1.0, -2.0]),
        make_sample(1, remove_sample=True, metadata={"round_number": 3}),
    ]
    data = convert_samples_to_train_data(make_args(), samples)
    assert data["rollout_log_probs"] == [[-1.0, -2.0], [0.0, 0.0]] and data["round_number"] == [1, 3]


def test_a_hook_of_training_rewards_needs_no_rewards(tmp_path):
    (tmp_path / "own.py").write_text(
        "def rewards(args, samples):\n    return [0] * len(samples), [2.0] * len(samples)\n"
    )
    args = make_args(custom_reward_post_process_path=f"{tmp_path}/own.py:rewards")
    assert convert_samples_to_train_data(args, [make_sample(reward=None)])["rewards"] == [2.0]


def test_columns_that_a_loop_brings_fit_the_samples():
    samples = [make_sample(0, response=2), make_sample(1, response=3)]
    assert checked_columns(samples, {"advantages": [[1.0] * 2, [1.0] * 3], "rewards": [1, 2]})["rewards"] == [1, 2]
    with pytest.raises(ValueError, match="column 'rewards' has 1 entries for 2 samples"):
        checked_columns(samples, {"rewards": [1]})
    with pytest.raises(ValueError, match="column 'returns' has 2 numbers for sample 1, whose response has 3 tokens"):
        checked_columns(samples, {"returns": [[1.0] * 2, [1.0] * 2]})


def test_routing_replay_names_the_empty_layer():
    experts = [[[1, 2], [0, 0]]] * 4
    samples = [make_sample(0, rollout_routed_experts=experts)]
    with pytest.raises(ValueError, match=r"MoE layers \[1\]"):
        convert_samples_to_train_data(make_args(use_rollout_routing_replay=True), samples)


REPLAY = dict(use_rollout_routing_replay=True)


def with_experts(index: int, **changes) -> Sample:
    return make_sample(index, rollout_routed_experts=[[[1, 2], [3, 0]]] * 4, **changes)


def test_routed_experts_travel_and_samples_out_of_the_loss_may_lack_them():
    samples = [with_experts(0), make_sample(1, reward=0.0, remove_sample=True)]
    column = convert_samples_to_train_data(make_args(**REPLAY), samples)["rollout_routed_experts"]
    assert [list(experts.shape) for experts in column] == [[4, 2, 2], [0, 2, 2]]
    assert column[0][3].tolist() == [[1, 2], [3, 0]]
    assert "rollout_routed_experts" not in convert_samples_to_train_data(make_args(), samples)


@pytest.mark.parametrize(
    ("experts", "message"),
    [
        (None, "sample 1 has no rollout_routed_experts"),
        ([[[1, 2]]] * 4, r"sample 1 has routed experts of shape \(4, 1, 2\)"),
        ([[[1, 2], [4, 0]]] * 4, "sample 1 has expert ids 0..4, the model has 4"),
    ],
)
def test_routed_experts_that_do_not_fit_are_named(experts, message):
    samples = [with_experts(0), make_sample(1, reward=0.0, rollout_routed_experts=experts)]
    with pytest.raises(ValueError, match=message):
        convert_samples_to_train_data(make_args(**REPLAY), samples)


# ---- groups are groups ---------------------------------------------------------------------------------------------


def rewards_of(samples, **changes):
    return convert_samples_to_train_data(make_args(**changes), samples)["rewards"]


def test_groups_are_normalised_by_index_wherever_their_samples_stand_and_however_many_they_are():
    rows = [(0, 1.0), (1, 3.0), (0, 0.0), (2, 5.0), (1, 1.0), (1, 2.0), (0, 2.0)]
    samples = [make_sample(i, group=group, reward=reward) for i, (group, reward) in enumerate(rows)]
    assert rewards_of(samples) == [0.0, 1.0, -1.0, 0.0, -1.0, 0.0, 1.0]


def test_fan_out_of_uneven_groups_is_counted_once_per_rollout():
    """Group 0: one rollout in three parts with reward 1, one with 0. Group 1: rollouts in two and four parts."""
    parts = [(0, 10, 1.0)] * 3 + [(0, 11, 0.0)] + [(1, 12, 4.0)] * 2 + [(1, 13, 2.0)] * 4
    samples = [make_sample(i, group=g, reward=r, rollout_id=e) for i, (g, e, r) in enumerate(parts)]
    assert rewards_of(samples) == [0.5] * 3 + [-0.5] + [1.0] * 2 + [-1.0] * 4
    scaled = rewards_of(samples, grpo_std_normalization=True)
    assert scaled[:4] == pytest.approx([0.7071] * 3 + [-0.7071], abs=1e-3)  # the std of [1, 0], not of four rows


def test_rounding_is_no_difference_between_parts_or_samples():
    parts = [(10, 0.3), (10, 0.1 + 0.2), (11, 0.3), (12, 0.1 + 0.2)]
    samples = [make_sample(i, reward=reward, rollout_id=execution) for i, (execution, reward) in enumerate(parts)]
    assert rewards_of(samples, grpo_std_normalization=True) == [0.0] * 4


@pytest.mark.parametrize("estimator", ["grpo", "ppo"])
@pytest.mark.parametrize("reward", [float("nan"), float("inf")])
def test_a_reward_that_is_not_finite_names_its_sample(reward, estimator):
    samples = [make_sample(0), make_sample(1, reward=reward)]
    with pytest.raises(ValueError, match="sample 1 .*the reward is (nan|inf)"):
        convert_samples_to_train_data(make_args(advantage_estimator=estimator), samples)


@pytest.mark.parametrize("value", [0.9, 0.1, 1 / 3, 1e9 + 0.1])
def test_equal_rewards_give_exactly_zero_in_every_group(value):
    samples = [make_sample(i, group=i % 3, reward=value) for i in range(24)]
    assert rewards_of(samples, grpo_std_normalization=True) == [0.0] * 24


def test_removed_samples_count_in_their_group_and_train_nothing():
    samples = [make_sample(0, reward=1.0), make_sample(1, reward=0.0, remove_sample=True), make_sample(2, reward=0.5)]
    data = convert_samples_to_train_data(make_args(), samples)
    assert data["rewards"] == [0.5, -0.5, 0.0] and data["loss_masks"][1] == [0, 0]
    assert data["rollout_mask_sums"] == [2, 0, 2]


@pytest.mark.parametrize("why", ["reward_error", "generate_error"])
def test_failed_samples_say_nothing_about_their_group(why):
    """Their reward of 0 is no verdict: a group of ones with a failed judge has no signal, instead of one for the ones."""
    failed = dict(reward=0.0, remove_sample=True, status=Sample.Status.FAILED, metadata={why: "judge down"})
    samples = [make_sample(0), make_sample(1), make_sample(2, **failed)]
    assert rewards_of(samples) == [0.0, 0.0, 0.0]
    samples[1].reward = 0.0
    assert rewards_of(samples) == [0.5, -0.5, 0.0]
    assert rewards_of([make_sample(i, **failed) for i in range(3)]) == [0.0, 0.0, 0.0]


def test_the_filter_takes_no_failed_reward_for_a_difference():
    from slime.rollout.filter_hub.dynamic_sampling_filters import check_reward_nonzero_std

    failed = make_sample(2, reward=0.0, metadata={"reward_error": "judge down"})
    verdict = check_reward_nonzero_std(make_args(), [make_sample(0), make_sample(1), failed])
    assert (verdict.keep, verdict.reason) == (False, "zero_std_1.0")


def test_every_sample_is_checked_unless_the_flag_says_no():
    samples = [make_sample(0, rollout_log_probs=[-1.0, float("nan")]), make_sample(1, rollout_log_probs=[-1.0, -1.0])]
    with pytest.raises(ValueError, match="sample 0 .*response token 1 has nan"):
        convert_samples_to_train_data(make_args(), samples)
    assert len(convert_samples_to_train_data(make_args(check_samples=False), samples)["tokens"]) == 2


def test_executions_are_told_apart_when_every_prompt_counts_its_own():
    """A generate function numbers the executions of each prompt 0, 1; each fanned out into two samples."""
    samples = [
        make_sample(4 * group + 2 * execution + part, group, reward=execution, rollout_id=execution)
        for group in (5, 6)
        for execution in (0, 1)
        for part in (0, 1)
    ]
    data = convert_samples_to_train_data(make_args(), samples)
    ids = data["rollout_ids"]
    assert ids[:4] == [0, 0, 1, 1] and ids[4] == ids[5] and ids[6] == ids[7] and len(set(ids)) == 4
    assert data["rollout_mask_sums"] == [4] * 8 and data["rewards"] == [-0.5, -0.5, 0.5, 0.5] * 2
