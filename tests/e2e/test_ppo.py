"""PPO through the public commands: the critic learns first, then both; one checkpoint holds both; the look-ahead loop."""

from __future__ import annotations

import os

import pytest
from safetensors.torch import load_file

from slime.config import checkpoint_dirs
from slime.observability.tracking import read_metrics
from tests.e2e.conftest import base_flags, finish, launch
from tests.e2e.test_checkpoint import hold_after, rounds_ended, wait_for
from tests.e2e.test_hook_examples import undocumented
from tests.e2e.test_sync_loop import SMALL

CRITIC_FILE = "megatron: [{name: critic, role: critic, overrides: {lr: 1e-2, value_clip: 10}}]"


def weights_of(folder, rollout_id: int) -> dict:
    return load_file(folder / "hf" / str(rollout_id) / "model.safetensors")


@pytest.mark.slow
def test_fb_o07_killed_and_continued_ppo_ends_with_the_same_bits_and_critic_and_actor_of_one_round(
    cluster, workspace, tmp_path
):
    """On shared slots, with a reference, so that every role works in every round."""
    (tmp_path / "roles.yaml").write_text(CRITIC_FILE)
    runs = {}
    for name in ("straight", "killed"):
        folder = tmp_path / name
        flags = [
            *(*base_flags(workspace, folder), *SMALL, "--colocate", "--advantage-estimator", "ppo", "--kl-coef", 0.01),
            *("--num-rollout", 5, "--num-critic-only-steps", 2, "--megatron-config-path", tmp_path / "roles.yaml"),
            *("--deterministic-mode", "--save-interval", 2, "--save-hf", folder / "hf" / "{rollout_id}"),
            *("--global-batch-size", 8, "--check-weight-update-equal"),
            *("--custom-megatron-before-train-step-hook-path", "tests.e2e.hooks.held_beyond_a_round"),
        ]
        hold_after(folder, 2 if name == "killed" else 5)
        process = launch(flags, address=cluster)
        if name == "killed":
            wait_for(lambda: rounds_ended(folder, 0) >= 3, "round 2, which comes after a save", process)  # noqa: B023
            process.kill()
            process.communicate(timeout=60)
            hold_after(folder, 5)
            process = launch(flags, address=cluster)
        output = finish(process)
        assert process.returncode == 0, output[-4000:]
        assert ("next is round 2" in output) == (name == "killed")
        runs[name] = read_metrics(folder / "run")
        saved = checkpoint_dirs.all_complete(str(folder / "run" / "checkpoints"))
        assert [item.rollout_id for item in saved] == [1, 3, 4]
        assert all(os.path.isfile(f"{item.directory}/critic/metadata.json") for item in saved)
    for metric in (
        "train/critic-value_loss",
        "train/critic-grad_norm",
        "train/grad_norm",
        "rollout/values",
        "rollout/kl",
    ):
        series = [[line[metric] for line in lines if metric in line] for lines in runs.values()]
        assert series[0] == series[1] and len(series[0]) == {
            "train/grad_norm": 6,
            "rollout/values": 5,
            "rollout/kl": 5,
        }.get(metric, 10), metric
    losses = [line["train/critic-value_loss"] for line in runs["straight"] if "train/critic-value_loss" in line]
    assert sum(losses[-3:]) < 0.9 * sum(losses[:3])
    start, warmed, trained = load_file(workspace.model / "model.safetensors"), *(weights_of(folder, i) for i in (1, 4))
    assert all((warmed[name] == start[name]).all() for name in start)  # the critic alone was trained
    assert any((trained[name] != start[name]).any() for name in start)
    again = weights_of(tmp_path / "straight", 4)
    assert all((trained[name] == again[name]).all() for name in trained)


COMMON = (
    "--rollout-batch-size 4 --n-samples-per-prompt 4 --rollout-max-response-len 6 --num-rollout 3 --sglang-context-length 64 "
    "--lr 1e-3 --custom-rm-path tests.e2e.hooks.first_token_is_even --advantage-estimator ppo --kl-coef 0.01 --gamma 0.9 "
    "--num-critic-only-steps 1 --use-dynamic-batch-size --max-tokens-per-gpu 128 --check-weight-update-equal"
).split()
LAYOUTS = {
    "tensor": "--rollout-num-gpus 1 --tensor-model-parallel-size 2 --sequence-parallel",
    "pipeline, critic on slots of its own": "--colocate --pipeline-model-parallel-size 2 --critic-slots own",
}


@pytest.mark.slow
def test_critic_on_two_slots_learns_like_on_one(train, tmp_path):
    """Tensor parallel beside the actor, pipeline parallel on slots of its own: same values, same steps of both."""
    (tmp_path / "roles.yaml").write_text(CRITIC_FILE)
    common = (*COMMON, "--megatron-config-path", tmp_path / "roles.yaml")
    one = train(*common, "--actor-num-gpus-per-node", 1, "--rollout-num-gpus", 1, name="one")
    for name, flags in LAYOUTS.items():
        run = train(*common, "--actor-num-gpus-per-node", 2, *flags.split(), name=name.split(",")[0])
        for metric, count in {
            "train/critic-value_loss": 3,
            "train/critic-grad_norm": 3,
            "train/pg_loss": 2,
            "train/grad_norm": 2,
            "rollout/values": 3,
            "rollout/returns": 3,
        }.items():
            expected = one.series(metric)
            assert len(expected) == count, metric
            assert run.series(metric) == pytest.approx(expected, abs=2e-5, rel=5e-4), (name, metric)


def test_look_ahead_ppo_keeps_the_policy_that_generated_each_round(train):
    """With the critic on slots of its own. Old log-probs equal the engine's, though the weights had moved on by then."""
    flags = (*SMALL, "--num-rollout", 4, "--lr", 1e-2, "--advantage-estimator", "ppo", "--async-buffer-size", 2)
    run = train(*flags, "--critic-slots", "own", "--keep-old-actor", script="train_async.py")
    gaps, drift = run.series("train/train_rollout_logprob_abs_diff"), run.series("train/ppo_kl")
    assert len(gaps) == 4 and max(gaps) < 1e-4
    assert abs(drift[0]) < 1e-5 and max(map(abs, drift[2:])) > 1e-2
    assert undocumented(run) == set()
