"""Arguments of a small run in a temporary folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from slime.config import parse_args


@pytest.fixture
def parsed(tmp_path, monkeypatch):
    """``parsed(*flags)``: the arguments of a small run."""
    monkeypatch.chdir(tmp_path)

    def parse(*flags):
        model = Path(__file__).resolve().parents[2] / "assets" / "config" / "tiny-qwen3"
        model_and_data = ["--hf-checkpoint", str(model), "--prompt-data", str(tmp_path / "rows.jsonl")]
        (tmp_path / "rows.jsonl").write_text('{"prompt": "1", "label": "1"}\n')
        sizes = ["--num-rollout", "3", "--rollout-batch-size", "4", "--n-samples-per-prompt", "2"]
        output = ["--output-dir", str(tmp_path), "--run-name", "run"]
        return parse_args([*model_and_data, *sizes, *output, *flags])

    return parse
