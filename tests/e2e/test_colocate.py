"""Trainer and engines on the same slots: the same run as on separate ones, in turns."""

from __future__ import annotations

import json

import pytest

SMALL = (
    "--rollout-batch-size 4 --n-samples-per-prompt 4 --rollout-max-response-len 6 --sglang-context-length 64 --lr 1e-3 "
    "--custom-rm-path tests.e2e.hooks.first_token_is_even --num-rollout 3 --check-weight-update-equal"
).split()
#: As between GPUs; engines of this machine would get handles to shared memory.
BROADCAST = ("--update-weight-transport", "broadcast")


@pytest.mark.parametrize(
    "num_slots, transport", [(1, "broadcast"), (2, "disk"), pytest.param(2, "broadcast", marks=pytest.mark.slow)]
)
def test_colocated_run_equals_the_separate_one(train, tmp_path, num_slots, transport):
    """Weights through memory on the one side, through a process group or a folder on the other."""
    slots, flags = ("--actor-num-gpus-per-node", num_slots), ("--update-weight-transport", transport)
    if transport == "disk":
        flags += ("--update-weight-disk-dir", tmp_path / "weights")
        flags += ("--custom-update-weight-post-write-path", "tests.e2e.hooks.note_written_weights")
    shared = train(*SMALL, *slots, "--colocate", name="shared")
    separate = train(*SMALL, *slots, "--rollout-num-gpus", num_slots, *flags, name="separate")
    for name in ("rollout/raw_reward", "train/grad_norm", "train/loss"):
        assert len(shared.series(name)) == 3
        assert shared.series(name) == separate.series(name), name
    assert len(shared.series("perf/offload_wall_time")) == 3 and not separate.series("perf/offload_wall_time")
    assert len(shared.series("perf/wake_up_time")) == 3
    if transport == "disk":
        check_folders(separate.directory, tmp_path / "weights")


def check_folders(run_dir, folder) -> None:
    """None is left, and the hook was called on both ranks when one was complete and no engine had read it."""
    assert list(folder.glob("*weight*")) == []
    for rank in (0, 1):
        notes = [json.loads(line) for line in (run_dir / f"written_{rank}.jsonl").read_text().splitlines()]
        assert [note["folder"] for note in notes] == [str(folder / f"weight_v{v:06d}") for v in range(4)]
        assert [note["served"] for note in notes] == [["default"] * 2, ["0"] * 2, ["1"] * 2, ["2"] * 2]
        assert all({"model.safetensors", "config.json", "tokenizer.json"} <= set(note["files"]) for note in notes)


def test_engine_beyond_the_trainers_slots_gets_the_same_weights_by_broadcast(train):
    flags = "--actor-num-gpus-per-node 1 --rollout-num-gpus 2 --colocate --update-weights-interval 2".split()
    run = train(*SMALL, *flags, *BROADCAST)
    assert len(run.series("train/grad_norm")) == 3
    # Both engines were checked at each sync. Round 2 has round 1's weights, which the shared engine got back without a sync.
    gaps = run.series("train/train_rollout_logprob_abs_diff")
    assert gaps[0] < 1e-4 and gaps[2] < 1e-4 and gaps[1] < 0.1


def test_look_ahead_loop_refuses_shared_slots(train):
    run = train(*SMALL, "--colocate", script="train_async.py", check=False)
    assert run.status == 2 and "--colocate" in run.output and "train.py" in run.output
