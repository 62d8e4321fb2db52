"""The run scripts hand train.py flags that the parser takes."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from slime.config import parse_args
from slime.utils.tiny_model import make_tiny_model

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
QWEN3_4B = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "num_hidden_layers": 36,
    "hidden_size": 2560,
    "intermediate_size": 9728,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000,
    "max_position_embeddings": 40960,
    "tie_word_embeddings": True,
    "hidden_act": "silu",
    "attention_bias": False,
}


@pytest.fixture
def run_script(tmp_path):
    """Run a script with an interpreter that only records what it was given; return train.py's arguments."""
    recorder, record = tmp_path / "python", tmp_path / "arguments"
    recorder.write_text(f'#!/bin/sh\nprintf "%s\\n" "$@" > "{record}"\n')
    recorder.chmod(0o755)

    def run(name: str, *more: str, **environment: str) -> list[str]:
        done = subprocess.run(
            ["bash", SCRIPTS / name, *more],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=120,
            env={"PATH": "/usr/bin:/bin", "PYTHON": str(recorder), **environment},
        )
        assert done.returncode == 0, done.stderr
        script, *arguments = record.read_text().splitlines()
        assert Path(script) == SCRIPTS.parent / "train.py"
        return arguments

    return run


@pytest.fixture
def prompts(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "1+1=", "label": "2"}\n' * 64)
    return path


def test_the_cluster_script_s_flags_are_accepted(run_script, prompts, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model = tmp_path / "Qwen3-4B"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(QWEN3_4B))
    (model / "tokenizer.json").write_text("{}")
    environment = {"HF_CHECKPOINT": str(model), "PROMPT_DATA": str(prompts), "EVAL_DATA": str(prompts)}
    args = parse_args(run_script("run-qwen3-4B.sh", "--seed", "7", **environment))
    assert (args.world_size, args.rollout_num_engines, args.num_layers, args.seed) == (4, 4, 36, 7)
    assert [dataset.name for dataset in args.eval_datasets] == ["eval"]


def test_the_cluster_script_says_what_it_needs():
    done = subprocess.run(
        ["bash", SCRIPTS / "run-qwen3-4B.sh"],
        capture_output=True,
        text=True,
        timeout=120,
        env={"PATH": "/usr/bin:/bin"},
    )
    assert done.returncode != 0
    assert "HF_CHECKPOINT: folder of the Hugging Face model" in done.stderr


def test_the_two_core_script_makes_its_data_and_its_flags_are_accepted(run_script, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    arguments = run_script("run-cpu-tiny.sh", "--num-rollout", "2")
    make_tiny_model(tmp_path / "outputs" / "cpu-tiny-inputs" / "model")
    args = parse_args(arguments)
    assert (args.world_size, args.rollout_num_engines, args.num_rollout) == (1, 1, 2)
    rows = [
        json.loads(line)
        for line in Path(args.prompt_data[0] if isinstance(args.prompt_data, list) else args.prompt_data)
        .read_text()
        .splitlines()
    ]
    assert len(rows) == 100
    assert rows[-1] == {"prompt": "9+9=", "label": "18"}
