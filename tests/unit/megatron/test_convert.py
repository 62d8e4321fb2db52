"""Hugging Face folder to torch_dist and back: the same bytes, and what is refused."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from slime.config import UserError, parse_args
from slime.convert import hf_to_torch_dist, torch_dist_to_hf
from slime.utils.tiny_model import make_tiny_model

REPO = Path(__file__).resolve().parents[3]


def half(folder: Path) -> None:
    """Turn the folder's weights into bfloat16."""
    weights = {name: tensor.bfloat16() for name, tensor in load_file(folder / "model.safetensors").items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config.pop("dtype", None)
    (folder / "config.json").write_text(json.dumps(config | {"torch_dtype": "bfloat16"}))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_there_and_back_gives_the_same_weights(tmp_path, dtype):
    model = make_tiny_model(tmp_path / "model", tied=False)
    if dtype == "bfloat16":
        half(model)
    found = hf_to_torch_dist(["--hf-checkpoint", str(model), "--save", str(tmp_path / "dist")])
    assert found == str(tmp_path / "dist" / "release")
    back = ["--input-dir", str(tmp_path / "dist"), "--origin-hf-dir", str(model), "--output-dir", str(tmp_path / "hf")]
    torch_dist_to_hf(back)
    before, after = load_file(model / "model.safetensors"), load_file(tmp_path / "hf" / "model.safetensors")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) and before[name].dtype == after[name].dtype for name in before)
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert dtype in (config.get("torch_dtype"), config.get("dtype"))
    assert (tmp_path / "hf" / "tokenizer.json").is_file()
    with pytest.raises(ValueError, match="exists already; --force"):
        torch_dist_to_hf(back)
    torch_dist_to_hf([*back, "--force"])


def test_a_run_starts_from_a_converted_checkpoint(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model = make_tiny_model(tmp_path / "model")
    hf_to_torch_dist(["--hf-checkpoint", str(model), "--save", str(tmp_path / "dist"), "--num-layers", "2"])
    args = parse_args(
        ["--hf-checkpoint", str(model), "--ref-load", str(tmp_path / "dist"), "--use-kl-loss", "--num-rollout", "1"]
        + ["--disable-rollout-global-dataset"]
    )
    assert args.load == str(tmp_path / "dist") and args.start_rollout_id == 0


def test_what_does_not_fit_is_said(tmp_path):
    model = make_tiny_model(tmp_path / "model")
    with pytest.raises(UserError, match="--num-layers is 3"):
        hf_to_torch_dist(["--hf-checkpoint", str(model), "--save", str(tmp_path / "a"), "--num-layers", "3"])
    assert not (tmp_path / "a").exists()
    with pytest.raises(ValueError, match="--input-dir .*: not a Megatron checkpoint"):
        torch_dist_to_hf(
            ["--input-dir", str(model), "--origin-hf-dir", str(model), "--output-dir", str(tmp_path / "b")]
        )


def test_scripts_and_command_are_the_same(tmp_path):
    model = make_tiny_model(tmp_path / "model")
    script = [sys.executable, REPO / "tools" / "convert_hf_to_torch_dist.py"]
    done = subprocess.run(
        [*script, "--hf-checkpoint", model, "--save", tmp_path / "dist"],
        capture_output=True, text=True, timeout=120, cwd=REPO,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    command = [sys.executable, "-c", "from slime.cli import main; main()", "convert", "torch-dist-to-hf"]
    command += ["--output-dir", tmp_path / "hf"]
    done = subprocess.run(
        [*command, "--input-dir", tmp_path / "dist", "--origin-hf-dir", model],
        capture_output=True, text=True, timeout=120, cwd=REPO,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "hf" / "model.safetensors").is_file()
