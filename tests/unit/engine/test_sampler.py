"""Uniform numbers, inverse-CDF draws, filters."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from slime.engine import sampler


def draws(log_probs: torch.Tensor, count: int, **filters) -> torch.Tensor:
    """Tokens drawn `count` times from one row."""
    rows = log_probs.expand(count, -1)
    numbers = sampler.uniform(np.full(count, 99, dtype=np.uint64), np.arange(count))
    if not filters:
        return sampler.draw(rows, numbers, np.zeros(count, dtype=bool))
    columns = {
        name: np.full(count, filters.get(name, default), dtype=dtype)
        for name, default, dtype in (("top_p", 1.0, np.float32), ("top_k", 0, np.int64), ("min_p", 0.0, np.float32))
    }
    return sampler.draw_among(*sampler.candidates(rows, **columns), numbers)


def test_uniform_numbers_are_uniform_independent_and_below_one():
    numbers = sampler.uniform(np.full(50_000, 5, dtype=np.uint64), np.arange(50_000))
    assert numbers.dtype == np.float32
    assert 0 <= numbers.min() and numbers.max() < 1
    assert numbers.mean() == pytest.approx(0.5, abs=0.01)
    assert numbers.var() == pytest.approx(1 / 12, abs=0.01)
    assert abs(np.corrcoef(numbers[1:], numbers[:-1])[0, 1]) < 0.02


def test_uniform_depends_on_seed_and_counter_only():
    seeds = np.array([1, 2, 3], dtype=np.uint64)
    together = sampler.uniform(seeds, np.array([4, 5, 6]))
    assert together[1] == sampler.uniform(seeds[1:2], np.array([5]))[0]
    assert len(set(together.tolist())) == 3


def test_neighbouring_seeds_are_unrelated():
    seeds = np.arange(20_000, dtype=np.uint64)
    numbers = sampler.uniform(seeds, np.zeros(20_000, dtype=np.int64))
    assert abs(np.corrcoef(numbers[1:], numbers[:-1])[0, 1]) < 0.03


def test_draws_follow_the_distribution():
    p = torch.tensor([0.1, 0.0, 0.2, 0.3, 0.4])
    counts = torch.bincount(draws(p.log(), 20_000), minlength=5) / 20_000
    torch.testing.assert_close(counts, p, atol=0.015, rtol=0)
    assert counts[1] == 0


def test_tokens_without_probability_are_never_drawn():
    p = torch.zeros(300)
    p[7] = 1.0
    assert set(draws(p.log(), 5000).tolist()) == {7}
    numbers = np.array([0.0, 1 - 2.0**-23], dtype=np.float32)
    assert sampler.draw(p.log().expand(2, -1), numbers, np.zeros(2, dtype=bool)).tolist() == [7, 7]


def test_greedy_rows_take_the_most_likely_token():
    log_probs = torch.tensor([[0.1, 0.6, 0.3], [0.5, 0.2, 0.3]]).log()
    numbers = np.array([0.99, 0.99], dtype=np.float32)
    assert sampler.draw(log_probs, numbers, np.array([True, False])).tolist() == [1, 2]


@pytest.mark.parametrize(
    ("filters", "kept"),
    [
        ({"top_k": 2}, {3, 4}),
        ({"top_p": 0.65}, {3, 4}),
        ({"top_p": 0.75}, {2, 3, 4}),
        ({"top_p": 1e-6}, {4}),
        ({"min_p": 0.7}, {3, 4}),
        ({"top_k": 3, "top_p": 0.5}, {3, 4}),
        ({"top_k": 1}, {4}),
    ],
)
def test_filters_keep_the_right_tokens_in_proportion(filters, kept):
    p = torch.tensor([0.1, 0.0, 0.2, 0.3, 0.4])
    drawn = draws(p.log(), 5000, **filters)
    assert set(drawn.tolist()) == kept
    wanted = torch.where(torch.tensor([i in kept for i in range(5)]), p, 0.0)
    torch.testing.assert_close(torch.bincount(drawn, minlength=5) / 5000, wanted / wanted.sum(), atol=0.03, rtol=0)


def test_log_probabilities_divide_by_temperature_and_take_zero_as_one():
    logits = torch.tensor([[1.0, 2.0, 3.0]]).repeat(3, 1)
    got = sampler.log_probabilities(logits, np.array([1.0, 0.5, 0.0], dtype=np.float32))
    torch.testing.assert_close(got[0], logits[0].log_softmax(-1))
    torch.testing.assert_close(got[1], (logits[1] * 2).log_softmax(-1))
    torch.testing.assert_close(got[2], got[0])
