"""Adapters of two processes are those of one: data, tensor, sequence, context and pipeline parallel, one adapter or two."""

from __future__ import annotations

import pytest
import torch

from slime.utils.tiny_model import make_tiny_model
from tests.distributed.launch import run_ranks

RANKS = "tests.distributed.lora_ranks"
LAYOUTS = ("data", "tensor", "sequence", "pipeline_recompute", "virtual_pipeline")
OF_TWO = ("two_data", "two_sequence", "two_context", "two_pipeline_recompute")


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """(results of the two ranks, results of one rank), by scenario; two launches for all tests."""
    folder = tmp_path_factory.mktemp("lora")
    make_tiny_model(folder / "model", init_std=0.1, layers=4)
    for ranks in ("one", "two"):
        make_tiny_model(folder / ranks / "model", arch="qwen3_moe", init_std=0.1)
    two = run_ranks(RANKS, "two_ranks", 2, folder / "two")
    one = run_ranks(RANKS, "one_rank", 1, folder / "one")
    return {name: [rank[name] for rank in two] for name in two[0]}, one[0]


def assert_close(expected: dict, got: dict) -> None:
    assert expected.keys() == got.keys() and expected
    for name, tensor in expected.items():
        torch.testing.assert_close(got[name], tensor, atol=2e-5, rtol=1e-4, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("scenario", [*LAYOUTS, *OF_TWO])
def test_layouts_train_the_same_adapters(runs, scenario):
    results, expected = runs[0][scenario], runs[1]["two" if scenario in OF_TWO else "one"]
    for rank in results:  # every rank gives out the whole
        assert_close(expected["adapters"], rank["adapters"])
    assert any(bool(tensor.any()) for name, tensor in expected["adapters"].items() if "lora_B" in name)
    steps = {step: metrics for rank in results for step, metrics in rank["steps"].items()}
    assert steps.keys() == expected["steps"].keys() and len(steps) == 4
    for step, metrics in expected["steps"].items():
        for name, value in metrics.items():
            assert steps[step][name] == pytest.approx(value, abs=2e-5, rel=2e-4), (step, name)


def test_experts_on_several_ranks_train_the_same_adapters(runs):
    expected = runs[1]["experts"]
    for rank in runs[0]["experts"]:
        assert_close(expected["adapters"], rank["adapters"])
        assert_close(expected["merged"], rank["merged"])
    assert any(".experts.3." in name and bool(tensor.any()) for name, tensor in expected["adapters"].items())
    (steps,) = (rank["steps"] for rank in runs[0]["experts"] if rank["steps"])
    for step, metrics in expected["steps"].items():
        assert steps[step]["train/grad_norm"] == pytest.approx(metrics["train/grad_norm"], rel=2e-4)


@pytest.mark.parametrize("scenario", LAYOUTS)
def test_layouts_merge_to_the_same_model(runs, scenario):
    assert_close(runs[1]["one"]["merged"], runs[0][scenario][0]["merged"])


def test_adapters_saved_by_tensor_ranks_go_on_in_one_process(runs):
    assert_close(runs[0]["tensor"][0]["adapters"], runs[1]["resumed"]["adapters"])
