"""Two processes train a mixture of experts as one does, however its experts are spread."""

from __future__ import annotations

import pytest
import torch

from slime.utils.tiny_model import Experts, make_tiny_model
from tests.distributed.launch import run_ranks
from tests.distributed.test_train_layouts import assert_equal, merged

RANKS = "tests.distributed.expert_ranks"
LAYOUTS = (
    "data_parallel",
    "expert_parallel",
    "tensor_and_expert_parallel",
    "expert_tensor_parallel",
    "pipeline_parallel",
)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """(results of the two ranks, results of one rank), by scenario."""
    folder = tmp_path_factory.mktemp("experts")
    make_tiny_model(folder / "model", arch="qwen3_moe", init_std=0.1, experts=Experts(dense_layers=(1,)), layers=4)
    two = run_ranks(RANKS, "two_ranks", 2, folder / "two")
    one = run_ranks(RANKS, "one_rank", 1, folder / "one")
    return {name: [rank[name] for rank in two] for name in two[0]}, one[0]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_two_ranks_train_like_one(runs, layout):
    two, one = runs
    assert_equal(one["grpo"], merged(two[layout]))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_all_ranks_export_every_expert(runs, layout):
    two, _ = runs
    first, second = (rank["weights"] for rank in two[layout])
    assert list(first) == list(second)
    assert sum(".experts." in name for name in first) == 3 * 4 * 3
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_a_saved_run_continues_on_the_same_and_on_another_layout(runs):
    two, one = runs
    straight = two["saved"][0]["weights"]
    for weights in (two["resumed"][0]["weights"], one["resumed"]["weights"]):
        for name, tensor in straight.items():
            torch.testing.assert_close(weights[name], tensor, atol=2e-5, rtol=1e-4)
