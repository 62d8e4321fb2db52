"""Updates through version folders: what engines are told, what is left of a folder, and what a failure leaves behind."""

from __future__ import annotations

import logging
import os
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file

from slime.backends.weight_sync.disk import VersionFolder, remove_unfinished, version_folder
from slime.backends.weight_sync.publisher import WeightPublisher
from tests.unit.weight_sync.control_calls import FakeEngine


def written(root, version: int) -> VersionFolder:
    folder = version_folder(SimpleNamespace(update_weight_disk_dir=str(root)), version)
    os.mkdir(folder.path)
    save_file({"w": torch.full((4,), float(version))}, f"{folder.path}/model.safetensors")
    return folder


def update(engines: list[FakeEngine], folder: VersionFolder) -> None:
    publisher = WeightPublisher([], clients=engines, buffer_bytes=1, timeout_s=5)
    publisher.update(None, str(folder.version), finish=folder.load_into)


def test_update_is_pause_flush_read_version_continue(tmp_path):
    engines, folder = [FakeEngine(), FakeEngine()], written(tmp_path, 12)
    assert folder.path == f"{tmp_path}/weight_v000012"
    update(engines, folder)
    for engine in engines:
        assert engine.calls == ["pause", "flush", "update", "version", "continue"]
        assert engine.version == "12" and engine.held["w"].tolist() == [12.0] * 4
    assert folder.num_bytes() == os.path.getsize(f"{folder.path}/model.safetensors")
    folder.remove()
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("step", ["pause", "flush", "update", "version", "continue"])
def test_after_a_failure_engines_go_on_and_the_next_update_works(tmp_path, step):
    engines = [FakeEngine("http://broken", fail_at=step), FakeEngine()]
    with pytest.raises(RuntimeError, match=f"update to version 1 failed.*http://broken failed at {step}"):
        update(engines, written(tmp_path, 1))
    assert not any(engine.is_paused for engine in engines)
    assert os.path.isdir(tmp_path / "weight_v000001")  # one that does not answer may be reading it
    update(engines, written(tmp_path, 2))
    assert [engine.version for engine in engines] == ["2", "2"]


def test_what_a_write_that_was_cut_short_has_left_is_removed_by_the_next_one(tmp_path):
    for name in (".weight_v000007.incomplete", ".weight_v000007.old", "weight_v000006", ".other.incomplete"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "part-0").touch()
    remove_unfinished(SimpleNamespace(update_weight_disk_dir=str(tmp_path)))
    assert {path.name for path in tmp_path.iterdir()} == {"weight_v000006", ".other.incomplete"}


def test_folder_that_cannot_be_removed_is_said_and_stops_nothing(tmp_path, caplog):
    folder = VersionFolder(str(tmp_path / "gone"), 3)
    with caplog.at_level(logging.WARNING):
        folder.remove()
    assert "gone, which all engines have read, could not be removed" in caplog.text
