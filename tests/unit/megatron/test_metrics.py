"""Values of the trainer's metrics on a case that can be computed by hand: two rollouts, one with a masked token."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from slime.backends.megatron_utils import performance
from slime.backends.megatron_utils.metrics import PER_TOKEN_REPORTS, rollout_metrics, step_metrics
from slime.backends.megatron_utils.roles import TRAIN_ROLES
from slime.observability.timer import Timers


def make_args(**changes):
    values = dict(
        calculate_per_token_loss=False,
        use_rollout_logprobs=False,
        kl_loss_type="k1",
        loss_type="policy_loss",
        reward_key=None,
        log_correct_samples=True,
        share_prompts=True,
        skip_zero_advantage=False,
    )
    return SimpleNamespace(**{**values, **changes})


def make_data(**changes):
    """Responses of 3 tokens, the last one a tool's, and of 1 token; prompts of 2 and 4."""
    column = [torch.tensor([1.0, 3.0, 100.0]), torch.tensor([5.0])]
    data = {
        "tokens": [torch.arange(5), torch.arange(5)],
        "loss_masks": [torch.tensor([1, 1, 0], dtype=torch.int32), torch.tensor([1], dtype=torch.int32)],
        "rollout_mask_sums": torch.tensor([2.0, 1.0]),
        "response_lengths": [3, 1],
        "rewards": [0.5, -0.25],
        "truncated": [1, 0],
        "round_number": [3, 2],
        "raw_reward": [9.0, 1.0, 0.0],  # of the whole batch
        "partition": [1, 2],
        "global_batch_sizes": [2],
        **{key: column for key in PER_TOKEN_REPORTS if key != "kl"},
    }
    return {**data, **changes}


def test_tokens_count_by_rollout_and_samples_plainly():
    report = rollout_metrics(make_args(), make_data())
    for key in PER_TOKEN_REPORTS:
        if key != "kl":
            assert report[f"rollout/{key}"] == pytest.approx(((1 + 3) / 2 + 5) / 2), key
    plain = {"response_lengths": 2.0, "rewards": 0.125, "truncated": 0.5, "round_number": 2.5, "total_lengths": 5.0}
    assert {key: report[f"rollout/{key}"] for key in plain} == plain
    assert report["rollout/raw_reward"] == pytest.approx(10 / 3)
    assert "rollout/partition" not in report and "rollout/kl" not in report


def test_zeros_that_stand_for_the_rewards_of_sft_rows_are_not_reported():
    args = make_args(loss_type="sft_loss")
    report = rollout_metrics(args, make_data(raw_reward=[0, 0, 0], rewards=[0.0, 0.0]))
    assert not {"rollout/raw_reward", "rollout/rewards"} & set(report) and report["rollout/response_lengths"] == 2.0
    assert rollout_metrics(args, make_data())["rollout/raw_reward"] == pytest.approx(10 / 3)


def test_tokens_count_alike_with_the_per_token_loss():
    report = rollout_metrics(make_args(calculate_per_token_loss=True), make_data())
    assert report["rollout/log_probs"] == pytest.approx((1 + 3 + 5) / 3)
    assert report["rollout/rewards"] == 0.125


def test_parts_of_one_rollout_count_as_one():
    data = make_data(rollout_mask_sums=torch.tensor([3.0, 3.0]), global_batch_sizes=[1])
    assert rollout_metrics(make_args(), data)["rollout/advantages"] == pytest.approx((1 + 3 + 5) / 3)


def test_failed_and_odd_rewards_are_no_rewards():
    report = rollout_metrics(make_args(), make_data(raw_reward=[float("nan"), 1.0, None]))
    assert report["rollout/raw_reward"] == 1.0 and report["rollout/rewards"] == 0.5
    report = rollout_metrics(make_args(), make_data(raw_reward=[None] * 3))
    assert "rollout/raw_reward" not in report and "rollout/rewards" not in report
    of_dicts = make_data(raw_reward=[{"score": 3.0}, {"score": 1.0, "kind": "x"}, {"kind": "x"}])
    assert rollout_metrics(make_args(reward_key="score"), of_dicts)["rollout/raw_reward"] == 2.0
    assert (
        rollout_metrics(make_args(), make_data(raw_reward=[4.0]))["rollout/rewards"] == 0.125
    )  # of other rows than ours


def test_kl_is_measured_between_the_old_policy_and_the_reference():
    reference = [torch.tensor([0.0, 1.0, 7.0]), torch.tensor([2.0])]
    report = rollout_metrics(make_args(), make_data(ref_log_probs=reference, kl=[torch.zeros(3), torch.zeros(1)]))
    assert report["rollout/kl"] == pytest.approx(((1 + 2) / 2 + 3) / 2)


def test_entropy_of_correct_samples_needs_the_switch_and_measured_entropies():
    assert rollout_metrics(make_args(), make_data())["correct_entropy"] == pytest.approx(2.0)
    assert "correct_entropy" not in rollout_metrics(make_args(log_correct_samples=False), make_data())
    assert "correct_entropy" not in rollout_metrics(make_args(), make_data(raw_reward=[1.0, 0.0, 0.0]))
    without = make_data()
    del without["entropy"]
    assert "correct_entropy" not in rollout_metrics(make_args(), without)


def test_step_metrics_divide_sums_by_rollouts_or_tokens():
    sums = {"loss": 6.0, "ppo_kl": 3.0}
    assert step_metrics(make_args(), sums, 12.0, 4) == {"loss": 1.5, "ppo_kl": 0.75}
    assert step_metrics(make_args(calculate_per_token_loss=True), sums, 12.0, 4) == {"loss": 0.5, "ppo_kl": 0.25}


def test_speed_is_tokens_over_the_time_of_the_steps():
    timers = Timers()
    timers.add("actor_train", 2.0)
    timers.add("log_probs", 0.5)
    report = performance.metrics(make_args(), TRAIN_ROLES["actor"], make_data(), 8, timers)
    assert report["perf/actor_train_tok_per_s"] == 5.0 and report["perf/actor_train_read_tokens"] == 8.0
    assert (report["perf/actor_train_time"], report["perf/log_probs_time"]) == (2.0, 0.5)
