"""What goes wrong ends in one clear error or a counted skip; nothing hangs, nothing stays behind."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import psutil
import pytest
import torch

from slime.config import checkpoint_dirs
from tests.e2e.conftest import assert_all_ends, base_flags, command_line, finish, launch, processes_of, wait_until
from tests.e2e.test_hook_examples import missing, undocumented
from tests.e2e.test_sync_loop import SMALL

REWARDS = "tests.e2e.hooks."
INTERRUPT_DEADLINE_S = 10.0


def rounds_in(directory: Path) -> int:
    path = directory / "metrics.jsonl"
    return path.read_text().count("perf/round_time") if path.exists() else 0


def engine_process(directory: Path) -> psutil.Process | None:
    """The engine of a run below ``directory``: the server itself, not its supervisor."""
    for process in processes_of(directory):
        words = command_line(process)
        if "slime.engine" in words and "slime.utils.supervise" not in words:
            return process
    return None


def test_judge_that_raises_hangs_and_talks_nonsense_and_an_agent_without_samples_are_counted(train, tmp_path):
    run = train(
        *(*SMALL, "--num-rollout", 2, "--group-rm", "--custom-rm-path", REWARDS + "group_judge", "--rm-timeout", 5),
        *("--custom-generate-function-path", "tests.e2e.hooks.nothing_of_each_sixteenth"),
        *("--reward-key", "score", "--log-reward-category", "kind", "--log-passrate"),
        *("--log-correct-samples", "--use-rollout-entropy", "--use-kl-loss", "--kl-loss-coef", 0.01, "--use-tis"),
        *("--save-debug-rollout-data", tmp_path / "dump_{rollout_id}.pt"),
        *("--use-wandb", "--wandb-mode", "offline"),
    )
    assert run.series("rollout/reward_failed") == [4 + 4 + 1] * 2
    assert run.series("rollout/generation_failed") == [1] * 2
    assert run.series("rollout/raw_reward") == [(0.25 + 0.75 + 2 * 1.0) / 6] * 2  # of those that have one
    assert "reward of sample 0, 1, 2, 3 failed: RuntimeError: the judge is down" in run.output
    assert "reward of sample 4, 5, 6, 7 failed: TimeoutError: no reward within --rm-timeout 5" in run.output
    assert (
        run.series("rollout/error_cat/short") == [5 / 16] * 2 and run.series("rollout/error_cat/long") == [1 / 16] * 2
    )
    samples = torch.load(tmp_path / "dump_0.pt", weights_only=True)["samples"]
    assert [s["reward"]["score"] for s in samples] == [0.0] * 8 + [0.0, 0.0, 0.25, 0.75] + [0.0, 1.0] * 2
    assert [s["status"] for s in samples].count("failed") == 10 and samples[8]["response_length"] == 0
    assert (run.series("data/trained")[-1], run.series("data/failed")[-1]) == (4, 4)
    assert len(run.metrics("train/step")) == 2 and min(run.series("train/grad_norm")) > 0
    assert (missing(run), undocumented(run)) == (set(), set())
    (record,) = (run.directory / "wandb").glob("offline-run-*/run-*.wandb")
    wait_until(lambda: b"rollout/reward_failed" in record.read_bytes(), "W&B's own process to write")


def test_a_round_whose_rewards_all_fail_is_one_error_with_the_cause(train, tmp_path):
    run = train(*SMALL, "--num-rollout", 1, "--custom-rm-path", REWARDS + "always_fails", check=False)
    assert run.status == 1 and "the judge is down" in run.output
    assert_all_ends(tmp_path)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--prompt-data", "/absent/rows.jsonl"], "/absent/rows.jsonl"),
        (["--custom-rm-path", "tests.e2e.hooks.no_such_function"], "no_such_function"),
        (["--num-rolout", "3"], "--num-rollout"),
        (["--global-batch-size", "7"], "--global-batch-size 7"),
    ],
)
def test_mistakes_of_the_user_end_with_status_2_and_name_the_flag(train, flags, message):
    run = train(*SMALL, "--num-rollout", 1, *flags, check=False)
    if flags[0] == "--global-batch-size":  # 16 rollouts in steps of 7: allowed, said
        assert run.status == 0 and message in run.output
        return
    assert run.status == 2, run.output[-3000:]
    assert message in run.output and "Traceback" not in run.output


def test_bad_row_names_file_and_line(train, tmp_path):
    data = tmp_path / "rows.jsonl"
    data.write_text('{"prompt": "a", "label": "1"}\n{"prompt": "b", \n')
    run = train(*SMALL, "--num-rollout", 1, "--prompt-data", data, check=False)
    assert run.status == 2 and "rows.jsonl:2" in run.output


def test_one_of_two_engines_that_dies_in_a_round_is_one_error_that_names_it(cluster, workspace, tmp_path):
    flags = base_flags(workspace, tmp_path)
    process = launch([*flags, *SMALL, "--rollout-num-gpus", "2", "--num-rollout", "5000"], address=cluster)
    wait_until(lambda: rounds_in(tmp_path / "run") >= 1, "the first round")
    engine_process(tmp_path).kill()
    output = finish(process)
    assert process.returncode == 1
    assert "1 of 2 rollout engines died" in output and "http://" in output, output[-3000:]
    assert_all_ends(tmp_path)


def while_training(directory: Path) -> int:
    """A step of round 2 runs: the hook says so and takes its time. Returns the round of the checkpoint."""
    wait_until(lambda: (directory / "training").exists(), "training of round 2", poll_s=0.01)
    return 1


def while_saving(directory: Path) -> int:
    save = str(directory / "checkpoints")
    wait_until(lambda: checkpoint_dirs.tracked_round(save), "the checkpoint of round 1", poll_s=0.01)
    wait_until(lambda: checkpoint_dirs.cut_short(save), "the next save", poll_s=0.002)
    return checkpoint_dirs.tracked_round(save)


@pytest.mark.parametrize(
    ("signal_number", "moment", "whole_group"),
    [
        (signal.SIGINT, while_training, True),  # what Ctrl-C in a terminal does
        (signal.SIGTERM, while_saving, False),
    ],
)
def test_interrupt_ends_everything_within_ten_seconds_and_keeps_the_checkpoint(
    workspace, tmp_path, signal_number, moment, whole_group
):
    flags = [*base_flags(workspace, tmp_path), *SMALL, "--num-rollout", "5000", "--save-interval", 1]
    if moment is while_training:
        flags += ["--custom-megatron-before-train-step-hook-path", "tests.e2e.hooks.long_step_in_round_2"]
    process = launch(flags, address=None)
    try:
        saved = moment(tmp_path / "run")
        family = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
        assert len(family) > 6, "Ray, engine and router are running"
        (os.killpg if whole_group else os.kill)(process.pid, signal_number)
        started = time.monotonic()
        output = process.communicate(timeout=INTERRUPT_DEADLINE_S + 5)[0]
        left = psutil.wait_procs(family, timeout=max(0.1, INTERRUPT_DEADLINE_S - (time.monotonic() - started)))[1]
    finally:
        if process.poll() is None:
            process.kill()
    assert process.returncode == 130 and "Traceback" not in output, output[-3000:]
    assert not left, [survivor.cmdline() for survivor in left]
    assert_all_ends(tmp_path)
    kept = checkpoint_dirs.latest(str(tmp_path / "run" / "checkpoints")).rollout_id
    assert kept == saved if moment is while_training else kept >= saved


def test_killed_driver_leaves_no_server_behind(workspace, tmp_path):
    flags = base_flags(workspace, tmp_path)
    process = launch([*flags, *SMALL, "--num-rollout", "5000"], address=None)
    wait_until(lambda: rounds_in(tmp_path / "run") >= 1, "the first round")
    process.kill()
    process.communicate(timeout=60)
    assert_all_ends(tmp_path)
