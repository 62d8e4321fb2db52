"""Hooks that cannot be loaded: the error names the flag, the nearest name, or the user's line."""

from __future__ import annotations

import pytest

from slime.utils.misc import load_hook


def refused(path: str, error: type = ImportError) -> str:
    with pytest.raises(error) as info:
        load_hook(path, "custom_rm_path")
    assert str(info.value).startswith("--custom-rm-path: ")
    return str(info.value)


def test_misspelt_files_modules_and_names_are_suggested(folder):
    (folder / "my_reward.py").write_text("def score(args, sample): ...\n")
    (folder / "pack").mkdir()
    (folder / "pack" / "__init__.py").write_text("")
    (folder / "pack" / "judges.py").write_text("def strict(args, sample): ...\n")
    assert "no file" in refused("my_rewards.py:score") and "(did you mean my_reward.py?)" in refused(
        "my_rewards.py:score"
    )
    assert "(did you mean my_reward?)" in refused("my_rewrd.score")
    (folder / "bad.py").write_text("")
    assert "(did you mean bad?)" in refused("bda.score")  # and not Python's own bdb
    assert "(did you mean judges?)" in refused("pack.judge.strict")
    assert "(did you mean score?); it defines ['score']" in refused("my_reward.py:scores", AttributeError)
    assert "sys.path" in refused("nothing_like_it.f")


@pytest.mark.parametrize("spelling", ["broken.py:f", "broken.f"])
@pytest.mark.parametrize(
    "text, message",
    [
        ("def f(:\n", r"SyntaxError: invalid syntax (broken.py, line 1)"),
        ("import os\nimport no_such_library\n", "No module named 'no_such_library' (in {folder}/broken.py, line 2)"),
        ("import helper_of_it\n", "No module named 'deeper' (in {folder}/helper_of_it.py, line 1)"),
        ("from os import nothing\n", "cannot import name 'nothing' from 'os'"),
        ("x = {}['key']\n", "KeyError: 'key' (in {folder}/broken.py, line 1)"),
        ("import sys\nsys.exit(3)\n", "SystemExit: 3 (in {folder}/broken.py, line 2)"),
    ],
    ids=["syntax", "dependency", "dependency of a dependency", "name", "code", "exit"],
)
def test_a_hook_that_fails_while_it_is_imported_is_named_with_the_line(folder, spelling, text, message):
    (folder / "broken.py").write_text(text)
    (folder / "helper_of_it.py").write_text("import deeper\n")
    for _ in range(2):  # nothing half-loaded is left
        assert message.format(folder=folder) in refused(spelling)


def test_two_files_of_one_name_are_two_hooks(folder):
    for name in ("a", "b"):
        (folder / name).mkdir()
        (folder / name / "hook.py").write_text(f"def score(args, sample): return {name!r}\n")
    assert [load_hook(f"{name}/hook.py:score", "custom_rm_path")(None, None) for name in "ab"] == ["a", "b"]


def test_a_hook_does_not_silently_get_the_neighbour_of_another_one(folder):
    for name in ("a", "b"):
        (folder / name).mkdir()
        (folder / name / "shared_helpers.py").write_text(f"NAME = {name!r}\ndef tell(): return NAME\n")
    (folder / "a" / "hook.py").write_text(
        "import shared_helpers\ndef score(args, sample): return shared_helpers.NAME\n"
    )
    (folder / "b" / "hook.py").write_text("from shared_helpers import tell\ndef score(args, sample): return tell()\n")
    assert load_hook("a/hook.py:score", "custom_rm_path")(None, None) == "a"
    message = refused("b/hook.py:score")
    assert f"imports shared_helpers, which is {folder}/a/shared_helpers.py here" in message and "a/hook.py" in message


def test_relative_paths_homes_and_links_mean_the_same_file(folder, monkeypatch):
    monkeypatch.setenv("HOME", str(folder))
    (folder / "deep").mkdir()
    (folder / "deep" / "mine.py").write_text("calls = []\ndef score(args, sample): ...\n")
    (folder / "link.py").symlink_to(folder / "deep" / "mine.py")
    spellings = ("deep/mine.py:score", "./deep/../deep/mine.py:score", "~/deep/mine.py:score", "link.py:score")
    assert len({load_hook(path, "custom_rm_path") for path in spellings}) == 1
