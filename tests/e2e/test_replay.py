"""Recorded rounds trained again: the same bits with the same flags, an answer to "what if" with other ones."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.e2e.test_sync_loop import SMALL

TRAINED = ("train/loss", "train/grad_norm", "train/pg_clipfrac", "rollout/advantages", "rollout/log_probs")


def weights(folder: Path, rollout_id: int) -> bytes:
    return (folder / f"{rollout_id}" / "model.safetensors").read_bytes()


def test_replay_of_recorded_rounds_reproduces_the_training_steps_bit_for_bit(train, tmp_path):
    exports, steps = tmp_path / "exports", ("--num-rollout", 2, "--global-batch-size", 8, "--save-interval", 1)
    common = (*SMALL, *steps)
    hf = str(exports / "NAME" / "{rollout_id}")
    recorded = train(
        *common, "--dump-details", tmp_path / "dump", "--save-hf", hf.replace("NAME", "recorded"), name="recorded"
    )
    replay = ("--load-debug-rollout-data", tmp_path / "dump" / "rollout_data" / "{rollout_id}.pt")
    replayed = train(
        *(*common, *replay, "--save-hf", hf.replace("NAME", "replayed")),
        *("--save-debug-train-data", tmp_path / "again" / "{rollout_id}.pt"),
        name="replayed",
    )
    for metric in TRAINED:
        series = recorded.series(metric)
        assert series == replayed.series(metric) and len(series) == (4 if metric.startswith("train/") else 2), metric
    for rollout_id in (0, 1):
        assert weights(exports / "recorded", rollout_id) == weights(exports / "replayed", rollout_id)
        before, after = (
            torch.load(folder / f"{rollout_id}.pt", weights_only=True)["samples"]
            for folder in (tmp_path / "dump" / "train_data", tmp_path / "again")
        )
        assert len(before) == 16
        for old, new in zip(before, after, strict=True):
            assert old["sample_index"] == new["sample_index"]
            for column in ("tokens", "log_probs", "advantages", "loss_masks"):
                assert torch.equal(old[column], new[column]), column
    assert weights(exports / "recorded", 0) != weights(exports / "recorded", 1)
    assert recorded.series("perf/rollout_time") and not replayed.series("perf/rollout_time")


@pytest.mark.slow
def test_rounds_of_a_rollout_only_run_answer_what_another_loss_would_do(train, tmp_path):
    dump = tmp_path / "dump" / "{rollout_id}.pt"
    only = train(*SMALL, "--num-rollout", 1, "--debug-rollout-only", "--save-debug-rollout-data", dump, name="rollouts")
    assert only.series("perf/rollout_time") and not only.metrics("train/step")
    losses = {}
    for name, flags in {
        "mean": (),
        "what_if": ("--disable-grpo-std-normalization", "--calculate-per-token-loss"),
    }.items():
        run = train(*SMALL, "--num-rollout", 1, "--load-debug-rollout-data", dump, *flags, name=name)
        losses[name] = run.series("train/grad_norm")[0]
    assert losses["mean"] != losses["what_if"] and min(losses.values()) > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    "flags",
    [
        ("--lora-rank", 4, "--use-kl-loss", "--kl-loss-coef", 0.01),
        ("--advantage-estimator", "ppo", "--kl-coef", 0.01),
        ("--custom-generate-function-path", "tests.e2e.hooks.fan_out", "--calculate-per-token-loss"),
    ],
    ids=["lora", "ppo", "fan_out"],
)
def test_replay_reproduces_adapters_critics_and_split_executions(train, tmp_path, flags):
    common = (*SMALL, "--num-rollout", 2, "--save-interval", 1, *flags)
    hf = str(tmp_path / "hf" / "NAME" / "{rollout_id}")
    dump = tmp_path / "dump" / "rollout_data" / "{rollout_id}.pt"
    recorded = train(
        *common, "--dump-details", tmp_path / "dump", "--save-hf", hf.replace("NAME", "recorded"), name="recorded"
    )
    replayed = train(
        *common, "--load-debug-rollout-data", dump, "--save-hf", hf.replace("NAME", "replayed"), name="replayed"
    )
    for metric in ("train/loss", "train/grad_norm", "rollout/advantages", "train/critic-value_loss"):
        assert recorded.series(metric) == replayed.series(metric), metric
    assert len(recorded.series("train/grad_norm")) == 2
    for rollout_id in (0, 1):
        recorded_weights, replayed_weights = (
            weights(tmp_path / "hf" / n, rollout_id) for n in ("recorded", "replayed")
        )
        assert recorded_weights == replayed_weights
