"""What installs the project agrees with itself: requirements, pins, scripts, hooks and the imports of the code."""

from __future__ import annotations

import ast
import hashlib
import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]

#: required, though no module of ours imports them
INDIRECT = {
    "jinja2": "chat templates of tokenizers",
    "sympy": "math-verify parses with it",
}
#: imported only where the GPU image or a user brings them
OPTIONAL = {"sglang", "transformer_engine", "PIL", "wandb"}


def project() -> dict:
    """Return the [project] table; tomllib is missing in Python 3.10."""
    toml = pytest.importorskip("tomllib")
    return toml.loads((ROOT / "pyproject.toml").read_text())["project"]


def requirements(*extras: str) -> dict[str, Requirement]:
    lines = list(project()["dependencies"])
    for extra in extras:
        lines += project()["optional-dependencies"][extra]
    return {canonicalize_name(Requirement(line).name): Requirement(line) for line in lines}


def pins() -> dict[str, str]:
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if line and not line.startswith("#")]
    parsed = [re.fullmatch(r"([a-z0-9-]+)==([0-9a-z.]+)( ; python_version >= \"3\.\d+\")?", line) for line in lines]
    assert all(parsed), [line for line, match in zip(lines, parsed, strict=True) if not match]
    return {match[1]: match[2] for match in parsed}


def test_every_requirement_is_pinned_at_a_version_that_fits():
    for name, requirement in requirements("dev").items():
        assert requirement.specifier.contains(pins()[name]), requirement


def test_every_requirement_has_a_floor():
    for requirement in requirements("gpu", "wandb", "agent", "examples", "dev").values():
        assert ">=" in str(requirement.specifier), requirement


def test_constraints_do_not_bind_the_gpu_extra():
    assert not {"sglang", "transformer-engine"} & set(pins())
    assert "+" not in pins()["torch"]


def third_party_imports() -> set[str]:
    found = set()
    for path in (ROOT / "slime").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                found |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and not node.level:
                found.add(node.module.split(".")[0])
    return found - set(sys.stdlib_module_names) - {"slime", "slime_plugins"}


def distributions_of(modules: set[str]) -> set[str]:
    providers = importlib.metadata.packages_distributions()
    return {canonicalize_name(name) for module in modules for name in providers.get(module, [module])}


def test_what_the_code_imports_is_required_and_the_other_way_round():
    imported = distributions_of(third_party_imports() - OPTIONAL)
    required = set(requirements())
    assert imported - required - set(requirements("agent")) == set(), "imported but not required"
    assert required - imported - set(INDIRECT) == set(), "required but never imported"


def test_the_command_s_entry_point_exists():
    module, _, function = project()["scripts"]["slime"].partition(":")
    tree = ast.parse((ROOT / (module.replace(".", "/") + ".py")).read_text())
    assert function in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


def test_data_files_of_the_package_are_installed_with_it():
    toml = pytest.importorskip("tomllib")
    patterns = toml.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]["*"]
    suffixes = {pattern.removeprefix("*") for pattern in patterns}
    data = [p for p in (ROOT / "slime").rglob("*") if p.is_file() and p.suffix not in {".py", ".pyc", ".md"}]
    assert {path.suffix for path in data} <= suffixes


def test_the_licence_is_the_whole_apache_text():
    digest = hashlib.sha256((ROOT / "LICENSE").read_bytes()).hexdigest()
    assert digest == "cfc7749b96f63bd31c3c42b5c471bf756814053e847c10f3eb003417bc523d30"


def test_hooks_are_local_and_their_programs_are_installed_by_make():
    config = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())
    assert {repo["repo"] for repo in config["repos"]} == {"local"}
    hooks = [hook for repo in config["repos"] for hook in repo["hooks"]]
    assert {hook["language"] for hook in hooks} == {"system"}
    assert all(hook["entry"].startswith(".venv/bin/") for hook in hooks)


def test_the_ci_script_is_strict_and_reads_no_input():
    script = ROOT / ".ci" / "run"
    text = script.read_text()
    assert os.access(script, os.X_OK)
    assert subprocess.run(["bash", "-n", script], timeout=120).returncode == 0
    assert "set -euo pipefail" in text
    assert "exec </dev/null" in text


def test_the_gpu_image_has_the_pinned_megatron():
    assert f"megatron-core=={pins()['megatron-core']}" in (ROOT / "Dockerfile").read_text()


@pytest.fixture
def checkout(tmp_path):
    if shutil.which("make") is None:
        pytest.skip("make is not installed")
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path)
    (tmp_path / ".venv").mkdir()
    return tmp_path


def dry_run(folder: Path, *arguments: str) -> str:
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("MAKE", "MFLAGS"))}
    done = subprocess.run(
        ["make", "-n", *arguments], cwd=folder, capture_output=True, text=True, timeout=120, env=environment, check=True
    )
    return done.stdout


def test_a_second_install_does_nothing_until_requirements_change(checkout):
    stamp = re.search(r"touch (\.venv/\.installed-\S+)", dry_run(checkout, "install"))[1]
    (checkout / stamp).touch()
    assert "pip install" not in dry_run(checkout, "install")
    with open(checkout / "constraints.txt", "a") as file:
        file.write("# changed\n")
    assert "pip install" in dry_run(checkout, "install")


def test_a_torch_index_is_asked_for_torch_alone(checkout):
    lines = [
        line
        for line in dry_run(checkout, "install", "TORCH_INDEX=https://index.example").splitlines()
        if "example" in line
    ]
    assert len(lines) == 1
    assert lines[0].endswith("torch")


def test_every_target_is_in_the_help(checkout):
    targets = re.search(r"^\.PHONY: (.*)$", (checkout / "Makefile").read_text(), re.M)[1].split()
    shown = subprocess.run(["make", "help"], cwd=checkout, capture_output=True, text=True, timeout=120).stdout
    assert [target for target in targets if f"make {target} " not in shown] == []
