"""Updates through version folders: what engines are told, what is left of a folder, and what a failure leaves behind."""

from __future__ import annotations

import logging
import os
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

from slime.backends.weight_sync.disk import VersionFolder, version_folder
from slime.backends.weight_sync.publisher import WeightPublisher


class Engine:
    """An engine that reads folders; `fail_at` is the first call that it refuses."""

    def __init__(self, number: int, fail_at: str | None = None):
        self.base_url, self.fail_at = f"http://engine{number}", fail_at
        self.calls, self.held, self.version, self.is_paused = [], {}, "0", False

    def _note(self, name: str) -> None:
        self.calls.append(name)
        if name == self.fail_at:
            self.fail_at = None
            raise RuntimeError(f"{self.base_url}/{name} answered 400")

    def pause(self, mode):
        self.is_paused = True
        self._note("pause")

    def flush_cache(self, deadline_s):
        self._note("flush")

    def update_weights_from_disk(self, path, weight_version):
        self._note("update")
        self.held, self.version = load_file(f"{path}/model.safetensors"), weight_version

    def weight_version(self):
        self._note("version")
        return self.version

    def continue_generation(self, timeout_s=None):
        self.is_paused = False
        self._note("continue")

    def end_weight_update(self, timeout_s=None):
        """No window was open; nothing to do."""


def written(root, version: int) -> VersionFolder:
    folder = version_folder(SimpleNamespace(update_weight_disk_dir=str(root)), version)
    os.mkdir(folder.path)
    save_file({"w": torch.full((4,), float(version))}, f"{folder.path}/model.safetensors")
    return folder


def update(engines: list[Engine], folder: VersionFolder) -> None:
    publisher = WeightPublisher([], clients=engines, buffer_bytes=1, timeout_s=5)
    publisher.update(None, str(folder.version), finish=folder.load_into)


def test_update_is_pause_flush_read_version_continue(tmp_path):
    engines, folder = [Engine(0), Engine(1)], written(tmp_path, 12)
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
    engines = [Engine(0, fail_at=step), Engine(1)]
    with pytest.raises(RuntimeError, match=f"update to version 1 failed.*http://engine0/{step} answered 400"):
        update(engines, written(tmp_path, 1))
    assert not any(engine.is_paused for engine in engines)
    assert os.path.isdir(tmp_path / "weight_v000001")  # one that does not answer may be reading it
    update(engines, written(tmp_path, 2))
    assert [engine.version for engine in engines] == ["2", "2"]


def test_folder_that_cannot_be_removed_is_said_and_stops_nothing(tmp_path, caplog):
    folder = VersionFolder(str(tmp_path / "gone"), 3)
    with caplog.at_level(logging.WARNING):
        folder.remove()
    assert "gone, which all engines have read, could not be removed" in caplog.text
