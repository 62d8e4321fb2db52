"""Two processes train a mixture of experts as one does, with the engine's experts, however tokens and experts are spread."""

from __future__ import annotations

import pytest
import torch

from slime.utils.tiny_model import Experts, make_tiny_model
from tests.distributed.expert_ranks import EXPERTS, LAYERS, LAYOUTS, TOP_K
from tests.distributed.launch import run_ranks

RANKS = "tests.distributed.expert_ranks"


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """(results of the two ranks, results of one rank), by scenario."""
    folder = tmp_path_factory.mktemp("experts")
    experts = Experts(count=EXPERTS, per_token=TOP_K, dense_layers=(1,))
    make_tiny_model(folder / "model", arch="qwen3_moe", init_std=0.1, layers=LAYERS, experts=experts)
    two = run_ranks(RANKS, "two_ranks", 2, folder / "two")
    one = run_ranks(RANKS, "one_rank", 1, folder / "one")
    return {name: [rank[name] for rank in two] for name in two[0]}, one[0]


def assert_close(actual: dict, expected: dict) -> None:
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(actual[name], tensor, atol=2e-5, rtol=1e-4, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_two_ranks_train_like_one(runs, layout):
    two, one = runs
    (metrics,) = (rank["steps"][0] for rank in two[layout] if rank["steps"])
    for name, value in one["reference"]["steps"][0].items():
        assert metrics[name] == pytest.approx(value, abs=2e-5, rel=2e-4), name
    assert metrics["train/moe_replay_differs"] > 0.5  # the replayed experts are none that a router would choose
    assert_close(two[layout][0]["weights"], one["reference"]["weights"])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_all_ranks_export_every_expert(runs, layout):
    first, second = (rank["weights"] for rank in runs[0][layout])
    assert list(first) == list(second)
    assert sum(".experts." in name for name in first) == (LAYERS - 1) * EXPERTS * 3
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_a_saved_run_continues_on_the_same_and_on_another_layout(runs):
    two, one = runs
    straight = two["saved"][0]["weights"]
    assert_close(two["resumed"][0]["weights"], straight)
    assert_close(one["resumed"]["weights"], straight)
