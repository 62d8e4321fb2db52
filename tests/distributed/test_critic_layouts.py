"""A critic on two processes learns what it learns on one, and gives the actor the same values."""

from __future__ import annotations

import pytest
import torch

from slime.utils.tiny_model import make_tiny_model
from tests.distributed.critic_ranks import LAYOUTS
from tests.distributed.launch import run_ranks

RANKS = "tests.distributed.critic_ranks"
PARTS = ("steps", "rollout", "actor", "values")


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """(what two ranks report together, by layout; what one rank reports); two launches for all tests."""
    folder = tmp_path_factory.mktemp("critic")
    make_tiny_model(folder / "model", init_std=0.1)
    make_tiny_model(folder / "ref", init_std=0.1, seed=7)
    two = run_ranks(RANKS, "two_ranks", 2, folder / "two")
    (one,) = run_ranks(RANKS, "one_rank", 1, folder / "one")
    return {name: {part: two[0][name][part] | two[1][name][part] for part in PARTS} for name in LAYOUTS}, one


def assert_equal(got: dict, expected: dict) -> None:
    for part in ("steps", "actor"):
        assert got[part].keys() == expected[part].keys() and got[part]
        for step, metrics in expected[part].items():
            for name, value in metrics.items():
                assert got[part][step][name] == pytest.approx(value, abs=2e-5, rel=2e-4), (part, step, name)
    for name, value in expected["rollout"].items():
        assert got["rollout"][name] == pytest.approx(value, abs=2e-5, rel=2e-4), name
    assert sorted(got["values"]) == sorted(expected["values"]) == list(range(8))
    for sample, row in expected["values"].items():  # after two rounds: so are the weights
        torch.testing.assert_close(got["values"][sample], row, atol=5e-5, rtol=1e-3)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_two_ranks_learn_the_values_that_one_learns(runs, layout):
    layouts, one = runs
    assert_equal(layouts[layout], one["plain"])
    assert one["plain"]["rollout"]["rollout/kl"] != 0 and len(one["plain"]["steps"]) == 4


def test_critic_saved_by_two_tensor_ranks_goes_on_with_one(runs):
    _, one = runs
    expected = dict(one["plain"], steps={step: m for step, m in one["plain"]["steps"].items() if step >= 2})
    assert_equal(one["resumed"], expected)
