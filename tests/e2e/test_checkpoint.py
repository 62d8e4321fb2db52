"""Killed at any moment and started again with the same command: the run goes on, nothing trained twice, no prompt lost."""

from __future__ import annotations

import os
import random
import signal
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch

from slime.config import checkpoint_dirs
from slime.observability.tracking import read_metrics
from slime.ray.run_folders import RunFolders
from slime.rollout import ledger_command
from slime.rollout.data_ledger import DataLedger
from tests.e2e.conftest import Workspace, command_line, digits_rows, finish, launch, processes_of, write_rows
from tests.e2e.test_failures import engine_process
from tests.e2e.test_sync_loop import SMALL

KILL_DEADLINE_S = 600.0
NUM_ROWS = 40


def command(workspace: Workspace, folder: Path, *flags) -> list:
    base = ["--hf-checkpoint", workspace.model, "--output-dir", folder, "--run-name", "run"]
    return [*base, *SMALL, *flags]


def wait_for(condition, what: str, process, poll_s: float = 0.05):
    give_up_at = time.monotonic() + KILL_DEADLINE_S
    while not (value := condition()):
        if process.poll() is not None:
            pytest.fail(f"the run ended before {what}:\n{process.communicate()[0][-4000:]}")
        assert time.monotonic() < give_up_at, f"waited {KILL_DEADLINE_S} s for {what}"
        time.sleep(poll_s)
    return value


def rounds_ended(folder: Path, since: float) -> int:
    """Rounds that ended after a time; lines of an earlier attempt may still be there."""
    return sum("perf/round_time" in line and line["time"] > since for line in read_metrics(folder / "run"))


def worker(name: str) -> psutil.Process:
    """A Ray actor's process of the cluster that this test session started."""
    children = psutil.Process().children(recursive=True)
    (found,) = [p for p in children if "".join(command_line(p)).startswith(f"ray::{name}")]
    return found


def driver(folder: Path) -> psutil.Process:
    (found,) = [p for p in processes_of(folder) if "train.py" in " ".join(command_line(p))]
    return found


def hold_after(folder: Path, rollout_id: int) -> None:
    """Rounds after this one are held before their training, by tests.e2e.hooks.held_beyond_a_round."""
    folder.mkdir(exist_ok=True)
    (folder / "held").unlink(missing_ok=True)
    (folder / "new").write_text(str(rollout_id))
    (folder / "new").replace(folder / "last_round")


def is_held(folder: Path) -> bool:
    return (folder / "held").exists()


def kill_in_a_save(process, folder: Path) -> None:
    save = str(folder / "save")
    wait_for(lambda: checkpoint_dirs.tracked_round(save), "the first checkpoint", process)
    wait_for(lambda: checkpoint_dirs.cut_short(save) or is_held(folder), "the second save", process, 0.002)
    time.sleep(random.Random(7).uniform(0, 0.05))
    process.kill()


def kill_at_random(find, seed: int):
    def kill(process, folder: Path) -> None:
        started = time.time()
        wait_for(lambda: rounds_ended(folder, started) >= 2 or is_held(folder), "two rounds", process)
        wait_for(lambda: checkpoint_dirs.tracked_round(str(folder / "save")), "a checkpoint", process)
        time.sleep(random.Random(seed).uniform(0, 0.6))
        find(folder).kill()

    return kill


KILLS = (
    kill_in_a_save,
    kill_at_random(lambda folder: worker("TrainActor"), 1),
    kill_at_random(lambda folder: worker("RolloutManager"), 2),
)


def kill_trainer_in_a_save(process, folder: Path) -> None:
    started, left_before = time.time(), checkpoint_dirs.cut_short(str(folder / "save")).keys()
    wait_for(lambda: rounds_ended(folder, started) or is_held(folder), "a round", process)
    victim = worker("TrainActor")
    save = str(folder / "save")
    wait_for(lambda: checkpoint_dirs.cut_short(save).keys() - left_before or is_held(folder), "a save", process, 0.002)
    victim.kill()


#: What the slow test adds to KILLS: the driver at no special moment, the trainer while it writes.
MORE_KILLS = (kill_at_random(driver, 4), kill_trainer_in_a_save)


def attempts(folder: Path, flags: list, kills, num_rounds: int, cluster) -> Iterator[str]:
    """What each attempt of a run printed: one per kill, which comes before the last round, and the one that ends it."""
    flags = [*flags, "--custom-megatron-before-train-step-hook-path", "tests.e2e.hooks.held_beyond_a_round"]
    for number, kill in enumerate((*kills, None)):
        hold_after(folder, num_rounds if kill is None else num_rounds - 1 - len(kills) + number)
        process = launch(flags, address=cluster)
        try:
            if kill is not None:
                kill(process, folder)
                hold_after(folder, num_rounds)
            output = finish(process, KILL_DEADLINE_S)
        finally:
            if process.poll() is None:
                process.kill()
        assert process.returncode in ((0,) if kill is None else (1, -signal.SIGKILL)), output[-4000:]
        yield output


def final_state(folder: Path) -> dict:
    latest = checkpoint_dirs.latest(str(folder / "save"))
    return torch.load(Path(latest.directory) / "data_buffer.pt", weights_only=True)


def check_ledger(state: dict, trained: Counter) -> None:
    """Each prompt handed out ended once, is buffered or in flight; what was trained is what the rounds' dumps say."""
    order = list(range(NUM_ROWS))
    random.Random(state["data_set"]["seed"] + state["epoch_id"]).shuffle(order)
    handed_out = Counter({row: state["epoch_id"] for row in range(NUM_ROWS)})
    handed_out.update(order[: state["sample_offset"]])
    ledger = DataLedger()
    ledger.load_state_dict(state["ledger"])
    ends = ledger.per_row()
    still_open = [entry["row"] for entry in ledger.waiting.values()]
    assert Counter({row: sum(outcomes.values()) for row, outcomes in ends.items()}) + Counter(still_open) == handed_out
    for row, outcomes in ends.items():
        assert set(outcomes) == {"filtered" if row % 5 == 0 else "trained"}
    assert Counter({row: outcomes.get("trained", 0) for row, outcomes in ends.items()}) == trained


def check_ledger_command(folder: Path, capsys) -> None:
    """`slime ledger` finds the checkpoint and agrees; an altered one is refused with the prompt."""
    assert ledger_command.run(str(folder / "save")) == 0
    assert "every prompt handed out ended once or is open once" in capsys.readouterr().out
    state = final_state(folder)
    state["ledger"]["rows"][0][1] = 0
    torch.save(state, folder / "altered.pt")
    assert ledger_command.run(str(folder / "altered.pt")) == 1
    assert "epoch 0 row 1: handed out, then lost" in capsys.readouterr().out


def shown_in_tensorboard(folder: Path) -> dict[str, list[int]]:
    """The steps of each curve, as TensorBoard's own reader finds them."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "tensorboard"), size_guidance={"scalars": 0})
    events.Reload()
    return {tag: [event.step for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def killed_and_continued(cluster, workspace, tmp_path, kills, *more) -> None:
    """Run 16 rounds with filter, over-sampling and partial rollout through the kills, then check the ledger."""
    flags = command(
        workspace,
        tmp_path,
        *("--prompt-data", write_rows(tmp_path / "rows.jsonl", digits_rows(NUM_ROWS)), "--rollout-shuffle"),
        *("--num-rollout", 16, "--save", tmp_path / "save", "--save-interval", 2, "--save-keep-last", 2),
        *("--over-sampling-batch-size", 6, "--partial-rollout"),
        *("--dynamic-sampling-filter-path", "tests.e2e.hooks.drop_every_fifth_prompt"),
        *("--save-debug-rollout-data", tmp_path / "dump" / "{rollout_id}.pt", *more),
    )
    resumed_at = []
    for output in attempts(tmp_path, flags, kills, 16, cluster):
        resumed_at += [int(line.split()[-1]) for line in output.splitlines() if "next is round" in line]
    assert len(resumed_at) == len(kills) and resumed_at == sorted(resumed_at), resumed_at
    trained = Counter()
    for rollout_id in range(16):
        samples = torch.load(tmp_path / "dump" / f"{rollout_id}.pt", weights_only=True)["samples"]
        trained.update({sample["group_index"]: int(sample["label"]) for sample in samples}.values())
    check_ledger(final_state(tmp_path), trained)
    metrics = read_metrics(tmp_path / "run")
    for tag, steps in shown_in_tensorboard(tmp_path / "run").items():
        assert steps == [line["step"] for line in metrics if tag in line], tag
    assert [line["step"] for line in metrics if line["step_key"] == "train/step"] == list(range(16))
    versions = [line["rollout/weight_version"] for line in metrics if "rollout/weight_version" in line]
    assert versions == sorted(versions)
    saved = sorted(name for name in os.listdir(tmp_path / "save") if name.startswith("iter_"))
    assert saved == ["iter_0000013", "iter_0000015"]


@pytest.mark.slow
def test_fb_a02_killed_three_times_each_prompt_ends_exactly_once(cluster, workspace, tmp_path, capsys):
    """In a save, in the trainer, in the rollout process."""
    killed_and_continued(cluster, workspace, tmp_path, KILLS)
    check_ledger_command(tmp_path, capsys)


@pytest.mark.slow
def test_killed_in_the_driver_and_the_writing_trainer_each_prompt_ends_exactly_once(cluster, workspace, tmp_path):
    """Checkpoints are written in the background."""
    killed_and_continued(cluster, workspace, tmp_path, MORE_KILLS, "--async-save")


NUM_ROUNDS = 8


def exports(folder: Path) -> dict[str, bytes]:
    return {name: (folder / "hf" / name / "model.safetensors").read_bytes() for name in ("3", "7")}


@pytest.mark.slow
def test_deterministic_run_that_was_killed_three_times_ends_with_the_same_bits(cluster, workspace, tmp_path):
    """Also when the engines batch differently, and with a reference that moved before the kill.

    Killed are the driver in a save, then the trainer and the engine at random moments.
    """
    kills = (kill_in_a_save, kill_at_random(lambda folder: worker("TrainActor"), 3), kill_at_random(engine_process, 4))
    runs = {}
    for name, max_running in (("straight", 64), ("killed", 5)):
        folder = tmp_path / name
        flags = command(
            workspace,
            folder,
            *("--prompt-data", workspace.data, "--deterministic-mode", "--num-rollout", NUM_ROUNDS, "--use-kl-loss"),
            *("--kl-loss-coef", 0.05, "--ref-update-interval", 1, "--global-batch-size", 8),
            *("--lr-decay-style", "cosine", "--save", folder / "save"),
            *("--save-interval", 2, "--save-hf", folder / "hf" / "{rollout_id}"),
            *("--sglang-max-running-requests", max_running),
        )
        *_, output = attempts(folder, flags, kills if name == "killed" else (), NUM_ROUNDS, cluster)
        assert ("next is round" in output) == (name == "killed")
        runs[name] = read_metrics(folder / "run"), exports(folder)
    (straight, weights), (killed, weights_again) = runs["straight"], runs["killed"]
    for metric in ("train/grad_norm", "train/kl_loss", "train/lr-pg_0", "rollout/raw_reward", "rollout/log_probs"):
        series = [[line[metric] for line in lines if metric in line] for lines in (straight, killed)]
        assert len(series[0]) == NUM_ROUNDS * (2 if metric.startswith("train/") else 1)
        assert series[0] == series[1], metric
    assert max(line["train/kl_loss"] for line in straight if "train/kl_loss" in line) > 0
    assert weights == weights_again


def test_continued_with_other_sizes_and_a_sample_filter_every_prompt_ends_once(train, tmp_path, capsys):
    flags = ("--save", tmp_path / "save", "--save-interval", 1, "--over-sampling-batch-size", 6, "--partial-rollout")
    flags += ("--rollout-sample-filter-path", "tests.e2e.hooks.remove_first_group")
    train(*SMALL, *flags, "--num-rollout", 2, name="first")
    others = dict(save=None, update_weight_transport="nccl", update_weight_disk_dir=None)
    others |= dict(debug_rollout_only=False, num_rollout=4)
    held = RunFolders(SimpleNamespace(run_dir=str(tmp_path / "held"), **others))
    try:
        second = train(*SMALL, *flags, "--num-rollout", 4, name="held", check=False)
    finally:
        held.release()
    assert second.status == 2 and f"another run (process {os.getpid()} on " in second.output
    other = ("--n-samples-per-prompt", 2, "--rollout-batch-size", 3)
    third = train(*SMALL, *flags, *other, "--num-rollout", 4, name="third")
    assert "unfinished groups start again" in third.output
    assert ledger_command.run(str(tmp_path / "save")) == 0
    assert ledger_command.run(str(third.directory)) == 0  # its config.yaml names the folder
    outcomes = final_state(tmp_path)["ledger"]["outcomes"]
    assert outcomes == {"trained": 3 + 3 + 2 + 2, "filtered": 4}, capsys.readouterr().out
