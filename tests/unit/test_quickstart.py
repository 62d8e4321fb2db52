"""What the quickstart prints can be typed."""

from __future__ import annotations

import sys

import pytest

from slime.quickstart import run


@pytest.mark.parametrize(
    ("interpreter", "shown"), [("work/.venv/bin/python", ".venv/bin/python"), ("bin/python3", None)]
)
def test_printed_commands_name_the_interpreter_that_runs_them(monkeypatch, tmp_path, interpreter, shown):
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    monkeypatch.setattr(sys, "executable", str(tmp_path / interpreter))
    assert run._python() == (shown or str(tmp_path / interpreter))
