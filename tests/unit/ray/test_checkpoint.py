"""A checkpoint is complete or it is ignored."""

import json
import logging

import pytest

from slime.ray import checkpoint


def write(root, rollout_id, *, complete=True, weight_version=3):
    directory = root / f"iter_{rollout_id:07d}"
    directory.mkdir()
    (directory / "data_buffer.pt").write_bytes(b"state")
    if complete:
        checkpoint.commit(str(directory), rollout_id=rollout_id, weight_version=weight_version)
    return directory


def test_latest_is_the_newest_complete_checkpoint(tmp_path):
    write(tmp_path, 4)
    newest = write(tmp_path, 9, weight_version=10)
    assert checkpoint.latest(str(tmp_path)) == checkpoint.Checkpoint(str(newest), 9, 10)


def test_half_written_checkpoint_is_ignored_with_a_warning(tmp_path, caplog):
    complete = write(tmp_path, 4)
    write(tmp_path, 9, complete=False)
    with caplog.at_level(logging.WARNING):
        assert checkpoint.latest(str(tmp_path)).directory == str(complete)
    assert "iter_0000009" in caplog.text


def test_tracker_file_names_the_round_after_the_manifest_exists(tmp_path):
    directory = write(tmp_path, 4)
    assert (tmp_path / checkpoint.LATEST).read_text() == "4"
    assert json.loads((directory / checkpoint.MANIFEST).read_text())["files"] == ["data_buffer.pt"]


def test_directory_of_one_checkpoint_can_be_given_itself(tmp_path):
    directory = write(tmp_path, 4)
    assert checkpoint.latest(str(directory)).rollout_id == 4


def test_no_checkpoint_is_none(tmp_path):
    assert checkpoint.latest(str(tmp_path)) is None
    assert checkpoint.latest(str(tmp_path / "absent")) is None
    assert checkpoint.latest(None) is None


def test_checkpoint_that_lost_a_file_is_an_error_naming_it(tmp_path):
    directory = write(tmp_path, 4)
    (directory / "data_buffer.pt").unlink()
    with pytest.raises(RuntimeError, match="data_buffer.pt"):
        checkpoint.latest(str(tmp_path))
