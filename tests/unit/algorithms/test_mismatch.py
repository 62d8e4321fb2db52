"""The mismatch numbers of a round: by hand, masked, equal for every split; when they are alarming."""

from __future__ import annotations

import math

import pytest
import torch

from slime.algorithms.mismatch import is_alarming, mismatch_report, mismatch_sums


def report(train, rollout, masks):
    rows = [[torch.tensor(row) for row in column] for column in (train, rollout, masks)]
    return mismatch_report(*mismatch_sums(*rows))


def test_numbers_equal_the_formulas():
    got = report([[-1.0, -2.0, -3.0]], [[-1.5, -2.0, -2.0]], [[1, 1, 1]])
    d = [0.5, 0.0, -1.0]
    w = [math.exp(x) for x in d]
    assert got == pytest.approx(
        {
            "train_rollout_logprob_abs_diff": 0.5,
            "train_rollout_logprob_abs_diff_max": 1.0,
            "train_rollout_kl": 0.5 / 3,
            "train_rollout_k3_kl": sum(math.exp(x) - 1 - x for x in d) / 3,
            "train_rollout_ess": sum(w) ** 2 / (3 * sum(x * x for x in w)),
        }
    )


def test_equal_policies_have_no_gap_and_a_full_sample_size():
    got = report([[-1.0, -2.0]], [[-1.0, -2.0]], [[1, 1]])
    assert got["train_rollout_ess"] == 1.0
    assert all(value == 0.0 for name, value in got.items() if name != "train_rollout_ess")


def test_masked_tokens_count_nowhere_not_even_as_nan():
    clean = report([[-1.0, -2.0]], [[-1.5, -2.1]], [[1, 1]])
    masked = report([[-1.0, float("nan"), -2.0], [-9.0]], [[-1.5, -50.0, -2.1], [0.0]], [[1, 0, 1], [0]])
    assert masked == pytest.approx(clean)


def test_a_round_without_trained_tokens_has_no_numbers():
    assert report([[-1.0]], [[-2.0]], [[0]]) == {} == mismatch_report(*mismatch_sums([], [], []))
    assert not is_alarming({}, 1e-3)


def test_sums_of_any_split_give_the_numbers_of_the_whole():
    """Token-weighted: ranks of different size weigh by their tokens, the maximum is the largest of all."""
    generator = torch.Generator().manual_seed(0)
    lengths = (1, 40, 3, 17, 0, 9)
    train, rollout = ([-3 * torch.rand(n, generator=generator) for n in lengths] for _ in range(2))
    masks = [(torch.rand(n, generator=generator) < 0.7).int() for n in lengths]
    whole = mismatch_report(*mismatch_sums(train, rollout, masks))
    for parts in ([[0], [1, 2, 3, 4, 5]], [[5, 0], [1], [2, 4], [3]], [[0, 1, 2, 3, 4, 5], []]):
        results = [mismatch_sums(*([column[i] for i in part] for column in (train, rollout, masks))) for part in parts]
        sums = [sum(values) for values in zip(*(s for s, _ in results), strict=True)]
        assert mismatch_report(sums, max(largest for _, largest in results)) == pytest.approx(whole, rel=1e-12)


def test_huge_and_missing_log_probs_stay_finite():
    got = report([[0.0, -1.0, -1.0]], [[-1000.0, float("nan"), float("-inf")]], [[1, 1, 1]])
    assert all(math.isfinite(value) for value in got.values())
    assert got["train_rollout_logprob_abs_diff_max"] == 20.0


def test_alarm_by_mean_difference_or_by_sample_size():
    small = report([[-1.0, -2.0]], [[-1.0001, -2.0001]], [[1, 1]])
    assert not is_alarming(small, 1e-3) and is_alarming(small, 1e-5)
    uneven = report([[0.0] + [-1.0] * 9], [[-5.0] + [-1.0] * 9], [[1] * 10])
    assert uneven["train_rollout_ess"] < 0.5
    assert is_alarming(uneven, 10.0) and not is_alarming(uneven, 0)
