import os
import signal
from types import SimpleNamespace

import pytest

from slime.observability.progress import Progress
from slime.ray import checkpoint, run_folders
from slime.ray.interrupts import uninterrupted
from slime.ray.round_report import untrained_text
from slime.ray.run_folders import RunFolders
from slime.ray.session import Session


def folders(run_dir, save=None, transport="nccl", disk=None, **flags):
    flags = dict(update_weight_transport=transport, update_weight_disk_dir=disk and str(disk)) | flags
    flags = dict(debug_rollout_only=False, num_rollout=3) | flags
    return RunFolders(SimpleNamespace(run_dir=str(run_dir), save=save and str(save), **flags))


def test_folders_that_cannot_be_written_name_their_flag(tmp_path):
    (tmp_path / "file").write_text("")
    folders(tmp_path / "a b" / "run").release()
    assert (tmp_path / "a b" / "run").is_dir()
    with pytest.raises(OSError, match="--output-dir: cannot write to .*file/run: Not a directory"):
        folders(tmp_path / "file" / "run")
    with pytest.raises(OSError, match="--save: cannot write to .*file/save"):
        folders(tmp_path / "run", tmp_path / "file" / "save")
    with pytest.raises(OSError, match="--update-weight-disk-dir: cannot write to .*file/weights"):
        folders(tmp_path / "run", transport="disk", disk=tmp_path / "file" / "weights")
    folders(tmp_path / "run", disk=tmp_path / "file" / "unused").release()


@pytest.mark.parametrize(
    ("error", "leaves"),
    [
        (ValueError("--custom-rm-path x.py: no such function"), set()),
        (RuntimeError("rollout engine 0 did not become ready"), {"new"}),  # its logs may say more than the error
        (KeyboardInterrupt(), {"new"}),
    ],
)
def test_a_run_that_did_not_come_to_its_first_round_leaves_what_somebody_may_read(tmp_path, monkeypatch, error, leaves):
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "kept.txt").touch()
    flags = dict(update_weight_transport="nccl", num_rollout=3, debug_rollout_only=False, async_buffer_size=1)
    flags |= dict(use_tensorboard=False, use_wandb=False, start_notes=[])
    args = SimpleNamespace(run_dir=f"{tmp_path}/new", save=f"{tmp_path}/old", update_weight_disk_dir=None, **flags)

    def start(session):
        (tmp_path / "new" / "logs").mkdir()
        (tmp_path / "new" / "logs" / "engine_0.log").write_text("CUDA error")
        raise error

    monkeypatch.setattr(Session, "_start", start)
    monkeypatch.setattr("ray.is_initialized", lambda: False)  # that of other tests stays
    with pytest.raises(type(error)):
        Session(args).__enter__()
    assert {path.name for path in tmp_path.iterdir()} == {"old", *leaves} and (tmp_path / "old" / "kept.txt").exists()
    RunFolders(args).release()  # nothing is held


def test_a_start_that_fails_before_anything_was_started_leaves_nothing(tmp_path):
    held = folders(tmp_path / "run", tmp_path / "save")
    with pytest.raises(ValueError, match="--save: another run"):
        folders(tmp_path / "other", tmp_path / "save")
    held.release()
    assert not (tmp_path / "other").exists() and (tmp_path / "run").exists()


def test_of_two_runs_that_make_a_folder_at_the_same_time_the_refused_one_does_not_remove_it(tmp_path, monkeypatch):
    of_the_other = []

    def make(folder, flag, own=run_folders._make):
        own(folder, flag)
        if flag == "--save":
            of_the_other.extend(run_folders._hold(folder, flag))

    monkeypatch.setattr(run_folders, "_make", make)
    with pytest.raises(ValueError, match="--save: another run"):
        folders(tmp_path / "run", tmp_path / "save")
    of_the_other.pop().close()
    assert (tmp_path / "save").exists() and not (tmp_path / "run").exists()


def test_two_runs_at_a_time_do_not_write_to_one_place(tmp_path):
    first = folders(tmp_path / "run", tmp_path / "save")
    with pytest.raises(
        ValueError, match=rf"--run-name: another run \(process {os.getpid()} on .*\) writes to .*run now"
    ):
        folders(tmp_path / "run", tmp_path / "else")
    with pytest.raises(ValueError, match="--save: another run .* writes to .*save now"):
        folders(tmp_path / "other", tmp_path / "save")
    with pytest.raises(ValueError, match="--update-weight-disk-dir: another run .* writes to .*save now"):
        folders(tmp_path / "other", transport="disk", disk=tmp_path / "save")
    first.release()
    folders(tmp_path / "other", tmp_path / "save").release()
    folders(tmp_path / "run", tmp_path / "run").release()  # one place is held once


def test_a_run_that_saves_nothing_may_have_the_save_folder_of_a_running_one(tmp_path):
    first = folders(tmp_path / "run", tmp_path / "save")
    folders(tmp_path / "evaluation", tmp_path / "save", num_rollout=0).release()
    folders(tmp_path / "rollouts", tmp_path / "save", debug_rollout_only=True).release()
    first.release()


@pytest.mark.parametrize("forbidden", [("a+",), ("a+", "r")])
def test_a_folder_where_another_user_made_the_lock_can_be_used(tmp_path, monkeypatch, forbidden):
    def may_open(path, mode, **options):
        if mode in forbidden:
            raise PermissionError(path)
        return open(path, mode, **options)

    folders(tmp_path).release()
    monkeypatch.setattr(run_folders, "open", may_open, raising=False)
    held = folders(tmp_path)
    if "r" not in forbidden:
        with pytest.raises(ValueError, match="another run"):
            folders(tmp_path)
    held.release()


def test_a_failed_save_says_when_the_disk_is_full(tmp_path, monkeypatch):
    def save():
        with checkpoint.telling_free_space(str(tmp_path)):
            raise RuntimeError("unexpected pos 704 vs 598")

    monkeypatch.setattr(checkpoint.shutil, "disk_usage", lambda path: SimpleNamespace(free=3 << 19))
    with pytest.raises(RuntimeError, match="unexpected pos.*\n.*may be full: 1.5 MiB are free in "):
        save()
    monkeypatch.setattr(checkpoint.shutil, "disk_usage", lambda path: SimpleNamespace(free=1 << 40))
    with pytest.raises(RuntimeError, match="^unexpected pos 704 vs 598$"):
        save()


def test_a_second_interrupt_does_not_cut_the_end_short():
    before = signal.getsignal(signal.SIGINT)
    with uninterrupted():
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGTERM)
    assert signal.getsignal(signal.SIGINT) is before
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)


def test_the_line_of_a_round_holds_its_own_generation_also_when_the_next_one_ended_before_it():
    session, said = Session(SimpleNamespace(async_buffer_size=1)), {}
    session.tracker = SimpleNamespace(log=lambda metrics, step_key, step: None)
    session.console = SimpleNamespace(round_summary=lambda rollout_id, metrics: said.update({rollout_id: metrics}))
    for rollout_id in (0, 1):
        session._log_generated(rollout_id, {"rollout/response_len/mean": 10.0 + rollout_id})
    for rollout_id in (0, 1):
        session.end_round(rollout_id)
    assert [said[rollout_id]["rollout/response_len/mean"] for rollout_id in (0, 1)] == [10.0, 11.0]


def test_a_round_in_which_nothing_is_trained_is_a_warning():
    assert "round 3: no token of its samples counts" in untrained_text(3, {"rollout/trained_tokens": 0})
    assert untrained_text(3, {"rollout/trained_tokens": 1}) is None
    assert untrained_text(3, {}) is None  # a log function of the user's in place of the default


def test_a_round_whose_filter_drops_group_after_group_shows_signs_of_life():
    session, progress = Session(SimpleNamespace(async_buffer_size=1)), Progress()
    session.console = SimpleNamespace(update=lambda snapshot: None)
    progress.set_total("generate", 4)
    before = session._show(progress.snapshot())
    assert session._show(progress.snapshot()) == before  # time alone is none
    progress.add("generate", 0, tokens=5)  # a group that is generated, and dropped
    assert session._show(progress.snapshot()) != before
