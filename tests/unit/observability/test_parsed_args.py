"""Metrics and tracking read flags under the names that the parser gives them."""

import pytest

from slime.config import parse_args
from slime.observability.rollout_metrics import compute_eval_metrics, compute_rollout_metrics
from slime.observability.tracking import Tracker, read_metrics
from slime.utils.tiny_model import make_tiny_model
from slime.utils.types import Sample

SWITCHES = ["--log-passrate", "--log-multi-turn", "--log-correct-samples", "--log-reward-category", "kind"]


@pytest.fixture
def args(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "1+1=", "label": "2"}\n' * 8)
    flags = ["--hf-checkpoint", str(make_tiny_model(tmp_path / "model")), "--prompt-data", str(prompts), *SWITCHES]
    flags += ["--eval-interval", "1", "--eval-prompt-data", "sums", str(prompts)]
    flags += [
        "--rollout-num-gpus",
        "1",
        "--rollout-batch-size",
        "2",
        "--n-samples-per-prompt",
        "2",
        "--global-batch-size",
        "4",
    ]
    return parse_args(flags)


def test_a_round_and_an_evaluation_are_measured_and_logged(args):
    samples = [Sample(reward=float(i % 2), group_index=i // 2, index=i, response_length=3) for i in range(4)]
    metrics = compute_rollout_metrics(args, samples, 2.0, {"dynamic_filter/drop_x": 1})
    assert metrics["passrate/pass@1"] == 0.5
    results = {"rewards": [s.reward for s in samples], "truncated": [False] * 4, "samples": samples}
    metrics |= compute_eval_metrics(args, {"sums": results})
    with Tracker(args) as tracker:
        tracker.log(metrics, "rollout/step", 0)
    (line,) = read_metrics(args.run_dir)
    assert line["eval/sums"] == 0.5
    assert line.keys() >= metrics.keys()
