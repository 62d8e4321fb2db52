"""A step gives the same numbers on every parallel layout, and a checkpoint of one layout continues on another.

Compared with one rank, in float32: each sample's log-probs and advantages, the metrics of every step (loss, gradient norm and
the rest), and the weights after two optimizer steps. Layouts add the same terms in another order, so they differ by rounding:
float32 has 6e-8 of relative rounding, log-probs are near 6, and a step sums hundreds of terms. The largest differences measured
over all cases are 2.4e-6 (columns), 5.8e-6 (metrics, a gradient norm) and 5.1e-7 (weights); the bounds leave several times
that. A lost token, rank or layer moves these numbers by 1e-2 and more.
"""

from __future__ import annotations

from functools import cache

import pytest
import torch

from slime.utils.tiny_model import make_tiny_model
from tests.distributed.launch import run_ranks
from tests.distributed.layout_cases import CASES, REFERENCES

RANKS = "tests.distributed.train_ranks"
TOLERANCE = dict(columns=2e-5, metrics=2e-5, weights=5e-6)
COLUMNS = ("log_probs", "ref_log_probs", "advantages", "returns", "kl")


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """`runs(size)`: results of that many ranks, by case; each size is launched once, two ranks before one."""
    folder = tmp_path_factory.mktemp("layouts")
    for model in ("tied", "untied"):
        make_tiny_model(folder / model, hidden=32, layers=4, ffn=64, init_std=0.15, tied=model == "tied")
    make_tiny_model(folder / "experts", arch="qwen3_moe", hidden=32, layers=4, ffn=64, init_std=0.15)

    @cache
    def results(size: int) -> dict[str, list]:
        if size == 1:
            results(2)  # whose checkpoints one rank loads
        ranks = run_ranks(RANKS, "run_all", size, folder / str(size), deadline_s=240)
        return {name: [rank[name] for rank in ranks] for name in ranks[0]}

    results.folder = folder
    return results


def merged(results: list) -> dict:
    """The main rank reports, rank 0 has the weights."""
    out = {"weights": results[0]["weights"], "steps": {}, "rollout": {}}
    for r in results:
        out["steps"].update(r["steps"])
        out["rollout"].update(r["rollout"])
    return out


def dumped(runs, ranks: int, name: str) -> list[dict]:
    return torch.load(runs.folder / str(ranks) / "dumps" / f"{name}-0.pt", weights_only=True)["samples"]


def assert_equal_metrics(one: dict, many: dict) -> None:
    close = dict(abs=TOLERANCE["metrics"], rel=TOLERANCE["metrics"])
    assert one["steps"].keys() == many["steps"].keys() and one["steps"]
    for step, expected in one["steps"].items():
        assert expected.keys() == many["steps"][step].keys()
        for name, value in expected.items():
            assert many["steps"][step][name] == pytest.approx(value, **close), (step, name)
    for name, value in one["rollout"].items():
        if name.startswith("rollout/"):
            assert many["rollout"][name] == pytest.approx(value, **close), name


def assert_equal_weights(expected: dict, found: dict) -> None:
    assert expected.keys() == found.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(
            found[name], tensor, atol=TOLERANCE["weights"], rtol=0, msg=lambda m, n=name: f"{n}: {m}"
        )


def params() -> list:
    """Four ranks are slow on a small machine."""
    return [pytest.param(case, id=case.name, marks=[pytest.mark.slow] if case.ranks == 4 else []) for case in CASES]


@pytest.mark.parametrize("case", params())
def test_layout_trains_like_one_rank(runs, case):
    many, one = merged(runs(case.ranks)[case.name]), merged(runs(1)[case.reference])
    assert_equal_metrics(one, many)
    assert_equal_weights(one["weights"], many["weights"])
    for expected, found in zip(dumped(runs, 1, case.reference), dumped(runs, case.ranks, case.name), strict=True):
        assert expected["sample_index"] == found["sample_index"]
        for name in COLUMNS:
            if name in expected:
                torch.testing.assert_close(found[name], expected[name], atol=TOLERANCE["columns"], rtol=0)


def test_fb_o02_means_over_ranks_are_weighted_by_tokens_and_maxima_are_maxima(runs):
    """Against the samples themselves; the two ranks hold different numbers of tokens."""
    reported = merged(runs(2)["dp2"])["rollout"]
    differences = torch.cat(
        [(s["log_probs"] - s["rollout_log_probs"]).abs()[s["loss_masks"].bool()] for s in dumped(runs, 2, "dp2")]
    )
    name = "rollout/train_rollout_logprob_abs_diff"
    assert reported[name] == pytest.approx(float(differences.mean()), rel=1e-5)
    assert reported[f"{name}_max"] == pytest.approx(float(differences.max()), rel=1e-5)


def test_the_cases_that_are_compared_differ_from_each_other(runs):
    """Scenarios and models are told apart by the comparison above."""
    weights = [runs(1)[case.name][0]["weights"]["model.layers.0.self_attn.q_norm.weight"] for case in REFERENCES]
    distances = [float((a - b).abs().max()) for i, a in enumerate(weights) for b in weights[:i]]
    assert min(distances) > 20 * TOLERANCE["weights"]


@pytest.mark.parametrize("name", ["dp2", "tp2", "pp2", "pp2 vpp2", "cp2"])
def test_all_ranks_export_the_same_weights(runs, name):
    first, second = (rank["weights"] for rank in runs(2)[name])
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_non_finite_numbers_on_one_rank_skip_the_step_on_all(runs):
    results = runs(2)["nan"]
    assert [r["unchanged"] for r in results] == [True, True]
    assert [r["samples_seen"] for r in results] == [0, 0]


def test_resume_on_the_same_layout_is_exact(runs):
    straight, resumed = runs(2)["saved dp"][0]["weights"], runs(2)["dp -> dp"][0]["weights"]
    assert all(torch.equal(resumed[name], straight[name]) for name in straight)


@pytest.mark.parametrize(
    "resumed", ["dp -> tp", "tp -> pp", "tp -> cp", "vpp -> tp", "dp -> one", "tp -> one", "vpp -> one"]
)
def test_resume_on_another_layout(runs, resumed):
    """Two optimizer steps after loading: the second sees a wrong optimizer state, the first does not."""
    straight = runs(2)["saved " + resumed.split(" -> ")[0]][0]["weights"]
    assert_equal_weights(straight, runs(1 if resumed.endswith("one") else 2)[resumed][0]["weights"])
