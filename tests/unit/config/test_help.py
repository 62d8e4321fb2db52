"""Help text and the generated reference."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from slime.config import parse_args
from slime.config.docs import render
from slime.config.registry import all_flags, framework_flags

ROOT = Path(__file__).resolve().parents[3]


def test_help_is_grouped_and_names_every_framework_flag(capsys):
    with pytest.raises(SystemExit) as end:
        parse_args(["--help"])
    assert end.value.code == 0
    text = capsys.readouterr().out
    assert all(f"  {flag.name}" in text for flag in framework_flags())
    assert "--tp-comm-overlap" not in text
    order = [text.index(f"\n{name}\n") for name in ("cluster", "rollout", "data", "algorithm", "checkpoint", "logging")]
    assert order == sorted(order)


def test_help_all_names_every_flag(capsys):
    with pytest.raises(SystemExit):
        parse_args(["--help-all"])
    text = capsys.readouterr().out
    assert all(f"  {flag.name}" in text for flag in all_flags())


def test_help_shows_the_callers_flags(capsys):
    with pytest.raises(SystemExit):
        parse_args(["--help"], lambda parser: parser.add_argument("--my-bonus", help="extra reward"))
    assert "--my-bonus\n        extra reward" in capsys.readouterr().out


def test_help_works_without_any_other_argument_in_half_a_second():
    command = [sys.executable, "-c", "from slime.config import parse_args; parse_args(['--help'])"]
    best = min(_seconds(command) for _ in range(3))
    assert best < 0.5, f"--help took {best:.2f} s"


def _seconds(command: list[str]) -> float:
    """Processor time of a command: what a user waits for on a quiet machine, whatever else runs here."""
    before = os.times()
    subprocess.run(command, check=True, timeout=120, stdout=subprocess.DEVNULL, cwd=ROOT)
    after = os.times()
    return after.children_user - before.children_user + after.children_system - before.children_system


def test_flag_reference_is_up_to_date():
    text = (ROOT / "docs" / "reference" / "flags.md").read_text()
    assert text == render(), "run python tools/gen_flag_docs.py"
