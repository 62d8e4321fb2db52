"""A checkpoint is complete or it is ignored, wherever its writer is killed."""

import builtins
import contextlib
import json
import os
import shutil
from pathlib import Path

import pytest

from slime.config import checkpoint_dirs as dirs
from slime.config.spec import UserError
from slime.ray import checkpoint

FACTS = {"run_id": "run", "weight_version": 3, "started_from": None, "precision": "fp32", "model": {}}


def save(root, rollout_id, content="state", **options) -> str:
    """What the driver does at a save: two files of a nested tree stand for the trainer's and the Data Buffer's."""
    partial = checkpoint.begin(str(root), rollout_id)
    os.mkdir(os.path.join(partial, "reference"))
    for name in ("data_buffer.pt", "reference/weights"):
        with open(os.path.join(partial, name), "w") as file:
            file.write(f"{content} of {rollout_id}")
    return checkpoint.commit(partial, rollout_id=rollout_id, **{**FACTS, **options})


def content(root) -> str:
    """The chosen checkpoint's content, read as a resume would: the manifest's files checked."""
    found = dirs.latest(str(root))
    text = Path(found.directory, "data_buffer.pt").read_text()
    assert Path(found.directory, "reference", "weights").read_text() == text
    return text


def names(root) -> list[str]:
    return sorted(os.listdir(root))


class Killed(BaseException):
    """The process ended here; nothing of it runs afterwards."""


FILE_OPERATIONS = ("mkdir", "rename", "replace", "unlink", "rmdir", "fsync", "remove")


@contextlib.contextmanager
def killed_at(operation: int, before: bool):
    """End the writer at its n-th file operation, before or after it takes effect. Gives the list of what was done."""
    done: list[str] = []
    originals = {name: getattr(os, name) for name in FILE_OPERATIONS}
    open_file = builtins.open

    def step(name, call, *args, **kwargs):
        done.append(name)
        if len(done) > operation:
            raise Killed
        if len(done) == operation and before:
            raise Killed
        result = call(*args, **kwargs)
        if len(done) == operation:
            raise Killed
        return result

    def opened(path, mode="r", *args, **kwargs):
        if "w" not in mode:
            return open_file(path, mode, *args, **kwargs)
        return step("open", open_file, path, mode, *args, **kwargs)

    for name, call in originals.items():
        setattr(os, name, lambda *args, name=name, call=call, **kwargs: step(name, call, *args, **kwargs))
    builtins.open = opened
    try:
        yield done
    except Killed:
        done.append("killed")
    finally:
        builtins.open = open_file
        for name, call in originals.items():
            setattr(os, name, call)


def kill_everywhere(tmp_path, prepare, attempt, check):
    """Kill ``attempt`` at each of its file operations; ``check`` looks at what is left, then the attempt is made again."""
    operation, num_kills = 0, 0
    while True:
        operation += 1
        for before in (True, False):
            root = tmp_path / f"{operation}-{before}"
            prepare(root)
            with killed_at(operation, before) as done:
                attempt(root)
            if "killed" not in done:
                assert num_kills > 20, done
                return
            num_kills += 1
            check(root)
            attempt(root)
            assert content(root) == "new of 9"
            shutil.rmtree(root)


def test_killed_at_any_point_of_a_save_the_former_or_the_new_checkpoint_is_chosen(tmp_path):
    def check(root):
        assert content(root) in ("old of 4", "new of 9")

    def attempt(root):
        save(root, 9, "new")
        if content(root) == "new of 9":
            assert names(root) == ["iter_0000004", "iter_0000009", dirs.TRACKER]

    kill_everywhere(tmp_path, lambda root: save(root, 4, "old"), attempt, check)


def test_fb_a14_the_only_checkpoint_is_never_deleted_before_the_new_one_is_complete(tmp_path):
    def check(root):
        assert content(root) in ("old of 4", "new of 9")

    def attempt(root):
        save(root, 9, "new", keep_last=1)
        assert names(root) == ["iter_0000009", dirs.TRACKER]

    kill_everywhere(tmp_path, lambda root: save(root, 4, "old"), attempt, check)


def test_killed_while_a_round_is_saved_again_one_of_both_is_chosen(tmp_path):
    def check(root):
        assert content(root) in ("old of 9", "new of 9")

    def attempt(root):
        save(root, 9, "new")
        assert names(root) == ["iter_0000009", dirs.TRACKER]

    kill_everywhere(tmp_path, lambda root: save(root, 9, "old"), attempt, check)


def test_killed_in_the_very_first_save_there_is_no_checkpoint_or_a_whole_one(tmp_path):
    def check(root):
        assert dirs.latest(str(root)) is None or content(root) == "new of 9"

    kill_everywhere(tmp_path, lambda root: None, lambda root: save(root, 9, "new"), check)


def test_a_writer_of_a_killed_run_cannot_write_into_the_next_attempt(tmp_path):
    old = checkpoint.begin(str(tmp_path), 4)
    new = checkpoint.begin(str(tmp_path), 4)
    assert not os.path.exists(old) and old != new


def test_keep_last_counts_saves_and_leaves_other_runs_alone(tmp_path):
    save(tmp_path, 50, run_id="other")
    for rollout_id in (1, 2, 3, 4):
        save(tmp_path, rollout_id, keep_last=2)
    assert names(tmp_path) == ["iter_0000003", "iter_0000004", "iter_0000050", dirs.TRACKER]
    assert content(tmp_path) == "state of 4"


def test_after_going_back_the_new_history_wins_and_the_old_one_is_dropped(tmp_path):
    for rollout_id in (1, 3, 5, 7):
        save(tmp_path, rollout_id, "old", keep_last=4)
    save(tmp_path, 3, "new", keep_last=2)  # continued from round 1 on purpose
    assert content(tmp_path) == "new of 3"
    assert names(tmp_path) == ["iter_0000003", "iter_0000007", dirs.TRACKER]
    save(tmp_path, 5, "new", keep_last=2)
    assert names(tmp_path) == ["iter_0000003", "iter_0000005", dirs.TRACKER]


def test_a_checkpoint_of_another_run_is_kept_under_another_name(tmp_path, caplog):
    save(tmp_path, 4, "other", run_id="other")
    (tmp_path / "iter_0000005").mkdir()
    save(tmp_path, 4)
    save(tmp_path, 5)
    kept = [name for name in names(tmp_path) if ".earlier-" in name]
    assert [name.split(".")[0] for name in kept] == ["iter_0000004", "iter_0000005"]
    assert (tmp_path / kept[0] / "data_buffer.pt").read_text() == "other of 4"
    assert "is not of this run" in caplog.text and content(tmp_path) == "state of 5"


def test_manifest_records_sizes_and_the_order_of_saving(tmp_path):
    save(tmp_path, 4, after=6)
    found = Path(save(tmp_path, 9, weight_version=10))
    manifest = json.loads((found / dirs.MANIFEST).read_text())
    assert manifest["files"] == {"data_buffer.pt": 10, "reference/weights": 10}
    latest = dirs.latest(str(tmp_path))
    assert (latest.rollout_id, latest.sequence, latest.weight_version, latest.run_id) == (9, 8, 10, "run")
    assert (tmp_path / dirs.TRACKER).read_text() == "9"
    assert dirs.latest(str(tmp_path / "iter_0000004")).rollout_id == 4


def test_checkpoint_that_lost_a_file_is_an_error_naming_it(tmp_path):
    Path(save(tmp_path, 4), "reference", "weights").unlink()
    with pytest.raises(UserError, match="reference/weights is missing"):
        dirs.latest(str(tmp_path))
