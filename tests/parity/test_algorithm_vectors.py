"""Every case of tests/assets/algorithm-vectors.json against an implementation, this package's by default; and the kit itself.

Set VECTOR_ADAPTER to the dotted name of a module with an OPS table to check another one.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tools import vectors as kit

VECTORS = kit.load_vectors()
OPS = kit.load_ops(os.environ.get("VECTOR_ADAPTER", kit.OWN_ADAPTER))


@pytest.mark.parametrize("vector", VECTORS, ids=lambda vector: vector["id"])
def test_vector_matches_reference(vector):
    assert kit.check(vector, OPS) is None


def test_kit_covers_every_operation():
    assert len(VECTORS) == 85
    assert {vector["op"] for vector in VECTORS} <= set(OPS)


def vector_of(op: str) -> dict:
    return next(vector for vector in VECTORS if vector["op"] == op)


def test_kit_reports_wrong_missing_and_raising_operations():
    vector = vector_of("tis")
    expected = vector["expected"]
    assert kit.check(vector, {"tis": lambda inputs: expected}) is None
    first = next(iter(expected))
    wrong = {**expected, first: [x + 1e-4 for x in expected[first]]}
    assert f"result.{first}[0] is" in kit.check(vector, {"tis": lambda inputs: wrong})
    short = {**expected, first: expected[first][:-1]}
    assert "expected" in kit.check(vector, {"tis": lambda inputs: short})
    less = {key: value for key, value in expected.items() if key != first}
    assert kit.check(vector, {"tis": lambda inputs: less}) == f"result.{first} is missing"
    assert "has no operation 'tis'" in kit.check(vector, {})
    assert kit.check(vector, {"tis": lambda inputs: 1 / 0}).startswith("ZeroDivisionError")


def test_kit_runs_against_another_implementation(tmp_path):
    """A module of the user's, found in the working folder; one operation right, one wrong."""
    (tmp_path / "other.py").write_text(
        "import math\n"
        "def first_fit(i):\n"
        "    bins = []\n"
        "    for k, n in enumerate(i['lengths']):\n"
        "        for b in bins:\n"
        "            if sum(i['lengths'][j] for j in b) + n <= i['cap']:\n"
        "                b.append(k)\n"
        "                break\n"
        "        else:\n"
        "            bins.append([k])\n"
        "    return {'bins': bins}\n"
        "OPS = {'first_fit': first_fit, 'tis': lambda i: {'weights': []}}\n"
    )
    command = [sys.executable, "-m", "tools.vectors", "--adapter", "other", "--only"]
    env = {**os.environ, "PYTHONPATH": f"{kit.ROOT}{os.pathsep}{tmp_path}"}

    def run(only):
        return subprocess.run([*command, only], capture_output=True, text=True, cwd=tmp_path, env=env, timeout=120)

    done = run("first_fit")
    assert done.returncode == 0 and "2 of 2 vectors pass (other)" in done.stdout, done.stdout + done.stderr
    done = run("tis,gspo")
    assert done.returncode == 1 and "FAIL  tis-01" in done.stdout and "no operation 'gspo'" in done.stdout
    assert "no operation nothing" in run("nothing").stderr
