"""The SmolLM2 example's own parts, without its download: answer extraction, task files, flags, the converter's refusals."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from slime.config import parse_args
from slime.utils.async_utils import run
from slime.utils.tiny_model import make_tiny_model

ROOT = Path(__file__).resolve().parents[3]
EXAMPLE = ROOT / "examples" / "smollm2"


def load(path: Path):
    spec = importlib.util.spec_from_file_location(f"example_{path.stem}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    "response, label, answer",
    [
        ("The sum of 17 and 5 is 22.<|im_end|>", "22", "22"),
        ("3 - 9 = -6", "-6", "-6"),
        ("It is 1,024 in all", "1024", "1024"),
        ("It appears only once.", "1", "1"),
        ("Three times, in one word", "1", "1"),
        ("I do not know", "4", ""),
        (" 'olleh'.<|im_end|>", "olleh", "olleh"),
        ("Tayo\nbecause he said so", "Tayo", "Tayo"),
        ("", "Tayo", ""),
    ],
)
def test_answer_extraction(response, label, answer):
    assert load(EXAMPLE / "reward.py").extract_answer(response, label) == answer


def test_reward_is_one_for_a_right_answer_only():
    pytest.importorskip("reasoning_gym")
    reward = load(EXAMPLE / "reward.py")
    (row, *_) = load(EXAMPLE / "prepare.py").task_rows("chain_sum", {"min_terms": 2, "max_terms": 2})

    def score(response):
        return run(
            reward.reward_func(None, SimpleNamespace(response=response, label=row["label"], metadata=row["metadata"]))
        )

    assert score(f"That is {row['label']}.") == 1.0
    assert score("That is 123456.") == 0.0


def test_task_sets_share_no_question(tmp_path):
    pytest.importorskip("reasoning_gym")
    load(EXAMPLE / "prepare.py").make_tasks(tmp_path)
    train, held_out = (
        {json.loads(line)["prompt"][1]["content"] for line in (tmp_path / f"{name}.jsonl").read_text().splitlines()}
        for name in ("train", "held_out")
    )
    assert len(train) == 300 and len(held_out) == 30 and not train & held_out


def test_the_run_script_s_flags_are_accepted(tmp_path):
    recorder, record = tmp_path / "python", tmp_path / "arguments"
    recorder.write_text(f'#!/bin/sh\nprintf "%s\\n" "$@" > "{record}"\n')
    recorder.chmod(0o755)
    make_tiny_model(tmp_path / "model")
    for name in ("train", "held_out"):
        (tmp_path / f"{name}.jsonl").write_text('{"prompt": "1+1=", "label": "2"}\n' * 8)
    environment = {"PATH": "/usr/bin:/bin", "PYTHON": str(recorder), "WORK": str(tmp_path)}
    subprocess.run(["bash", EXAMPLE / "run.sh", "--seed", "7"], env=environment, timeout=120, check=True)
    script, *arguments = record.read_text().splitlines()
    assert Path(script) == ROOT / "train.py"
    args = parse_args([*arguments, "--output-dir", str(tmp_path / "outputs")])
    assert (args.seed, args.world_size, args.rollout_num_engines) == (7, 1, 1)


def convert(*arguments) -> str:
    tool = ROOT / "tools" / "convert_gguf_to_hf.py"
    done = subprocess.run([sys.executable, tool, *arguments], capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    return done.stderr


def test_the_converter_says_what_is_wrong(tmp_path):
    gguf, full = tmp_path / "m.gguf", tmp_path / "full"
    gguf.write_bytes(b"GGUF" + bytes(20))
    full.mkdir()
    (full / "file").write_text("")
    assert "does not exist" in convert(tmp_path / "none.gguf", tmp_path / "out")
    assert "is not a GGUF file" in convert(full / "file", tmp_path / "out")
    assert "is not an empty folder" in convert(gguf, full)
    if importlib.util.find_spec("gguf") is None:
        assert 'pip install -e ".[examples]"' in convert(gguf, tmp_path / "out")
    assert not (tmp_path / "out").exists()
