"""The benchmark scripts start, explain themselves, and run in their smoke mode."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}


def run(script: str, *words: str, deadline_s: float = 300) -> str:
    command = [sys.executable, str(ROOT / "benchmarks" / script), *words]
    done = subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT, cwd=ROOT, timeout=deadline_s)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize(
    "script",
    [
        *("grpo_vs_trl.py", "round_profile.py", "engine.py", "partial_rollout.py", "streaming_data.py"),
        *("train_step.py", "algorithm_curves.py", "startup.py"),
    ],
)
def test_help_says_how_to_run_it(script):
    assert f"python benchmarks/{script}" in run(script, "--help")


def test_engine_smoke_ends_in_a_result_line():
    result = json.loads(run("engine.py", "--smoke").splitlines()[-1].removeprefix("RESULT "))
    assert result["models"]["tiny-fp32"]["slime"]["tokens_per_s"] > 0


@pytest.mark.slow
def test_round_profile_smoke_accounts_for_the_cpu_time_of_a_round():
    """One real run of train.py through the benchmark's own flags; the parts add up to the whole."""
    result = json.loads(run("round_profile.py", "--smoke").splitlines()[-1].removeprefix("RESULT "))
    parts = result["cpu_by_part_ms"]
    assert sum(parts.values()) == pytest.approx(result["cpu_ms"], rel=0.05, abs=5)
    assert parts["engine: decode and sampling"] > 0 and parts["trainer: forward and backward"] > 0


def test_streaming_data_on_a_small_file_starts_and_goes_on_in_the_middle():
    result = json.loads(run("streaming_data.py", "--rows", "2000").splitlines()[-1].removeprefix("RESULT "))
    assert result["first"].startswith("question 0") and result["peak_mib"] < 1024 > result["resume_peak_mib"]


@pytest.mark.slow
def test_partial_rollout_smoke_measures_the_three_ways():
    result = json.loads(run("partial_rollout.py", "--smoke").splitlines()[-1].removeprefix("RESULT "))
    assert set(result["ways"]) == {"none", "over_sampling", "partial"} and result["ratio"] > 0 < result["ratio_none"]


def test_train_step_smoke_compares_equal_work():
    """The script refuses to time two sides whose losses or gradient norms differ."""
    result = json.loads(run("train_step.py", "--smoke").splitlines()[-1].removeprefix("RESULT "))
    assert set(result["cases"]) == {"equal", "long_tail", "fixed"} and result["ratio"] > 0
    assert result["cases"]["long_tail"]["tokens"] < result["cases"]["long_tail"]["padded_tokens"]


def test_pages_and_pictures_of_the_algorithms_show_the_recorded_numbers():
    from benchmarks import algorithm_curves as curves

    for page in curves.PAGES.glob("*.md"):
        assert curves.fill(page.read_text()) == page.read_text(), (
            f"{page}: python benchmarks/algorithm_curves.py --draw"
        )
    for path in curves.CURVES.glob("*.json"):
        assert path.with_suffix(".svg").read_text() == curves.picture(json.loads(path.read_text()))


def test_a_curve_is_drawn_between_its_marks():
    from benchmarks import algorithm_curves as curves

    curve = {"label": "reward", "settings": "x", "held_out": {"greedy": [0.1, 0.5]}, "values": [0.0, 1.0, 2.0, 3.0]}
    block = curves.block("grpo", curve)
    assert "| reward, mean of five rounds | 1.500 | 1.500 |" in block and "| 0.100 | 0.500 |" in block
    assert curves.MARK.sub("", block) == ""
    svg = curves.picture(curve)
    assert svg.count("<polyline") == 2 and svg.startswith("<svg")


def test_cpu_record_interpolates_between_samples():
    from benchmarks.common import TreeCpu

    record = TreeCpu(os.getpid(), "mark")
    record._times, record._rows = [10.0, 12.0, 14.0], [{1: 0.0}, {1: 2.0, 2: 1.0}, {1: 3.0, 2: 5.0}]
    record._labels = {1: "engine", 2: "trainer"}
    assert record.between(11.0, 13.0) == {"engine": 1.5, "trainer": 2.5, "total": 4.0}
