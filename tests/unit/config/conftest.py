"""Tiny model and data folders, and a parse that stands on them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from slime.config import parse_args

ASSETS = Path(__file__).resolve().parents[2] / "assets" / "config"


@pytest.fixture(autouse=True)
def work_in_empty_folder(tmp_path, monkeypatch):
    """Relative paths of a test mean its own folder; the machine shows no GPU."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


@pytest.fixture
def make_model(tmp_path):
    """Give a function that writes a model folder whose config.json has the given keys changed."""

    def make(name: str = "model", **changes) -> str:
        folder = tmp_path / name
        shutil.copytree(ASSETS / "tiny-qwen3", folder)
        config = json.loads((folder / "config.json").read_text()) | changes
        config = {key: value for key, value in config.items() if value is not None}
        (folder / "config.json").write_text(json.dumps(config))
        return str(folder)

    return make


@pytest.fixture
def data(tmp_path) -> str:
    """A file of one prompt."""
    path = tmp_path / "train.jsonl"
    path.write_text('{"prompt": "What is 2 + 2?", "label": "4"}\n')
    return str(path)


@pytest.fixture
def parse(make_model, data):
    """Parse flags on top of the smallest complete command line."""
    model = make_model("base")

    def run(*words: str, **options):
        return parse_args(["--hf-checkpoint", model, "--prompt-data", data, *words], **options)

    return run
