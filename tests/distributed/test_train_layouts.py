"""Two processes train what one does: data, tensor, sequence and pipeline parallel, and resume across layouts."""

from __future__ import annotations

import pytest
import torch

from slime.utils.tiny_model import make_tiny_model
from tests.distributed.launch import run_ranks

RANKS = "tests.distributed.train_ranks"


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """(results of the two ranks, results of one rank), by scenario; two launches for all tests."""
    folder = tmp_path_factory.mktemp("layouts")
    make_tiny_model(folder / "model", init_std=0.1)
    two = run_ranks(RANKS, "two_ranks", 2, folder / "two")
    one = run_ranks(RANKS, "one_rank", 1, folder / "one")
    return {name: [rank[name] for rank in two] for name in two[0]}, one[0]


def merged(results: list) -> dict:
    """The main rank reports, rank 0 has the weights."""
    out = {"weights": results[0]["weights"], "steps": {}, "rollout": {}}
    for r in results:
        out["steps"].update(r["steps"])
        out["rollout"].update(r["rollout"])
    return out


def assert_equal(one: dict, many: dict, weight_tolerance: float = 2e-5) -> None:
    assert one["steps"].keys() == many["steps"].keys() and one["steps"]
    for step, expected in one["steps"].items():
        for name, value in expected.items():
            assert many["steps"][step][name] == pytest.approx(value, abs=2e-5, rel=2e-4), (step, name)
    for name, value in one["rollout"].items():
        if name.startswith("rollout/"):
            assert many["rollout"][name] == pytest.approx(value, abs=2e-5, rel=2e-4), name
    assert one["weights"].keys() == many["weights"].keys()
    for name, tensor in one["weights"].items():
        torch.testing.assert_close(
            many["weights"][name], tensor, atol=weight_tolerance, rtol=1e-4, msg=lambda m, n=name: f"{n}: {m}"
        )


@pytest.mark.parametrize("scenario", ["grpo", "whitened_per_token"])
def test_two_data_ranks_train_like_one(runs, scenario):
    two, one = runs
    assert_equal(one[scenario], merged(two[scenario]))


@pytest.mark.parametrize("scenario", ["tensor_parallel", "sequence_parallel", "pipeline_parallel"])
def test_model_parallel_ranks_train_like_one(runs, scenario):
    two, one = runs
    assert_equal(one["grpo"], merged(two[scenario]))


@pytest.mark.parametrize("scenario", ["grpo", "tensor_parallel", "pipeline_parallel"])
def test_all_ranks_export_the_same_weights(runs, scenario):
    first, second = (rank["weights"] for rank in runs[0][scenario])
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_non_finite_numbers_on_one_rank_skip_the_step_on_all(runs):
    results = runs[0]["nan"]
    assert [r["unchanged"] for r in results] == [True, True]
    assert [r["samples_seen"] for r in results] == [0, 0]


def test_resume_on_the_same_layout_is_exact(runs):
    straight, resumed = runs[0]["saved"][0]["weights"], runs[0]["resumed"][0]["weights"]
    assert all(torch.equal(resumed[name], straight[name]) for name in straight)


def test_resume_on_other_layouts(runs):
    two, one = runs
    straight = two["saved"][0]["weights"]
    for weights in (two["resumed_tensor_parallel"][0]["weights"], one["resumed"]["weights"]):
        for name, tensor in straight.items():
            torch.testing.assert_close(weights[name], tensor, atol=2e-5, rtol=1e-4)
