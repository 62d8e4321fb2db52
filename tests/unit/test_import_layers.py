"""Which package may import which: each layer only downwards, heavy libraries only where they belong, no cycles.

A new package needs a row in LAYERS. EXCEPTIONS is for deliberate breaches, each with its reason; it may only shrink.
"""

from __future__ import annotations

import ast
import functools
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[2]

BELOW_ROLLOUT = {"config", "utils", "algorithms", "batching", "observability"}
#: package -> packages of slime that it may import
LAYERS = {
    "config": set(),
    "utils": {"config"},
    "algorithms": {"utils"},
    "batching": {"utils", "algorithms"},
    "observability": {"config", "utils", "algorithms", "batching"},
    "rollout": BELOW_ROLLOUT,
    "engine": {"utils"},
    "backends": BELOW_ROLLOUT,
    "ray": BELOW_ROLLOUT | {"rollout", "backends", "engine"},
}
#: commands over the whole library: nothing imports them
TOP = {"cli", "quickstart", "doctor", "dash", "convert"}

#: names that users' code imports, for code that lies elsewhere: nothing of ours imports these, so they may import upwards
PUBLIC_PATHS = {
    f"slime.utils.{name}"
    for name in "distributed_utils ppo_utils metric_utils logging_utils tracking_utils timer trace_utils".split()
}

#: (importer, imported) -> reason
EXCEPTIONS: dict[tuple[str, str], str] = {}
MAX_EXCEPTIONS = 2

#: package -> third-party libraries it may import at all; packages without a row may import any but HEAVY
ONLY = {
    "config": {"yaml", "sglang"},
    "algorithms": {"torch", "numpy"},
    "batching": {"torch", "numpy"},
}
HEAVY = {"ray", "sglang", "sglang_router", "megatron", "transformer_engine", "vllm"}
#: where a heavy library may be imported (prefix of the module's name); False: inside functions only
HEAVY_ALLOWED = {
    ("slime.ray", "ray"): True,
    ("slime.ray", "sglang_router"): True,
    ("slime.utils", "ray"): False,
    ("slime.utils", "sglang"): False,
    ("slime.config", "sglang"): False,
    ("slime.backends.megatron_utils", "megatron"): True,
    ("slime.backends.megatron_utils", "transformer_engine"): False,
    ("slime.backends.sglang_utils", "sglang"): False,
    **{(f"slime.{name}", library): False for name in TOP for library in ("ray", "megatron")},
}


class Import(NamedTuple):
    importer: str
    imported: str
    line: int
    is_lazy: bool  # inside a function


@functools.cache
def modules() -> dict[str, Path]:
    found = {}
    for path in sorted((ROOT / "slime").rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


@functools.cache
def imports() -> tuple[Import, ...]:
    return tuple(found for name, path in modules().items() for found in imports_of(name, path))


def imports_of(name: str, path: Path) -> list[Import]:
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    found: list[Import] = []

    def visit(node: ast.AST, is_lazy: bool) -> None:
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            return
        for imported in names_of(node, package):
            found.append(Import(name, imported, node.lineno, is_lazy))
        is_function = isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
        for child in ast.iter_child_nodes(node):
            visit(child, is_lazy or is_function)

    visit(ast.parse(path.read_text(encoding="utf-8"), filename=str(path)), False)
    return found


def names_of(node: ast.AST, package: str) -> list[str]:
    """Return the modules a statement imports; `from p import m` counts as p.m where that is a module of ours."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if not isinstance(node, ast.ImportFrom):
        return []
    above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
    base = ".".join([*above, *([node.module] if node.module else [])])
    return [f"{base}.{alias.name}" if f"{base}.{alias.name}" in modules() else base for alias in node.names]


def layer_of(module: str) -> str:
    return (module.split(".") + [""])[1]


def is_ours(module: str) -> bool:
    return module.split(".")[0] == "slime"


def explain(breaches: list[Import]) -> str:
    return "\n".join(f"{b.importer}:{b.line} imports {b.imported}" for b in sorted(set(breaches)))


def test_every_package_has_a_layer():
    packages = {layer_of(name) for name in modules()} - {""}
    assert packages <= set(LAYERS) | TOP, "add the package to LAYERS: what may it import?"


def test_each_layer_imports_only_downwards():
    breaches = [
        i
        for i in imports()
        if is_ours(i.imported)
        and layer_of(i.importer) in LAYERS
        and i.importer not in PUBLIC_PATHS
        and layer_of(i.imported) not in LAYERS[layer_of(i.importer)] | {layer_of(i.importer), ""}
        and (i.importer, i.imported) not in EXCEPTIONS
    ]
    assert not breaches, explain(breaches)


def test_nothing_of_ours_imports_what_is_there_for_users_code():
    assert PUBLIC_PATHS <= set(modules())
    breaches = [i for i in imports() if i.imported in PUBLIC_PATHS]
    assert not breaches, explain(breaches)


def test_exceptions_are_few_and_still_needed():
    used = {(i.importer, i.imported) for i in imports()}
    assert len(EXCEPTIONS) <= MAX_EXCEPTIONS
    assert set(EXCEPTIONS) <= used


def test_pure_packages_import_only_their_libraries():
    breaches = [
        i
        for i in imports()
        if layer_of(i.importer) in ONLY
        and not is_ours(i.imported)
        and i.imported.split(".")[0] not in ONLY[layer_of(i.importer)] | sys.stdlib_module_names
    ]
    assert not breaches, explain(breaches)


def heavy_use_is_allowed(use: Import, library: str) -> bool:
    rules = [
        at_top
        for (prefix, name), at_top in HEAVY_ALLOWED.items()
        if name == library and (use.importer == prefix or use.importer.startswith(prefix + "."))
    ]
    return any(at_top or use.is_lazy for at_top in rules)


def test_heavy_libraries_stay_in_their_places():
    breaches = [
        i
        for i in imports()
        if i.imported.split(".")[0] in HEAVY and not heavy_use_is_allowed(i, i.imported.split(".")[0])
    ]
    assert not breaches, explain(breaches)


def test_configuration_imports_libraries_inside_functions_only():
    breaches = [
        i
        for i in imports()
        if layer_of(i.importer) in ("config", "") and not is_ours(i.imported) and not i.is_lazy
        if i.imported.split(".")[0] not in sys.stdlib_module_names
    ]
    assert not breaches, explain(breaches)


def test_no_modules_import_each_other_in_a_circle():
    graph: dict[str, set[str]] = {name: set() for name in modules()}
    for i in imports():
        if not i.is_lazy and i.imported in graph and i.imported != i.importer:
            graph[i.importer].add(i.imported)
    assert find_cycle(graph) is None


def find_cycle(graph: dict[str, set[str]]) -> list[str] | None:
    done: set[str] = set()

    def walk(node: str, path: list[str]) -> list[str] | None:
        if node in path:
            return path[path.index(node) :] + [node]
        if node in done:
            return None
        for following in sorted(graph[node]):
            cycle = walk(following, [*path, node])
            if cycle:
                return cycle
        done.add(node)
        return None

    return next((cycle for node in graph if (cycle := walk(node, []))), None)


def test_the_circle_finder_finds_one():
    assert find_cycle({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == ["b", "c", "b"]
    assert find_cycle({"a": {"b", "c"}, "b": {"c"}, "c": set()}) is None


def run_python(code: str, *flags: str) -> str:
    done = subprocess.run(
        [sys.executable, *flags, "-c", f"import sys; sys.path.insert(0, {str(ROOT)!r})\n{code}"],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("module", ["slime", "slime.config"])
def test_import_needs_the_standard_library_alone(module):
    run_python(f"import {module}", "-S", "-E")


@pytest.mark.parametrize("module", ["slime.config", "slime.observability.progress", "slime.observability.tracking"])
def test_light_modules_load_no_torch(module):
    code = f"import {module}; print(sorted({{'torch', 'ray', 'megatron', 'transformers', 'numpy'}} & set(sys.modules)))"
    assert run_python(code) == "[]\n"


def test_samples_need_nothing_heavier_than_torch():
    code = "import slime.utils.types; print(sorted({'ray', 'megatron', 'transformers', 'aiohttp'} & set(sys.modules)))"
    assert run_python(code) == "[]\n"


def test_importing_changes_nothing_in_the_process():
    names = [n for n in modules() if not n.startswith("slime.backends.megatron_utils") and not n.endswith("__main__")]
    code = f"""
import importlib, logging, os, threading
import aiohttp, torch, ray, transformers, rich, tensorboard, sglang_router
before = dict(os.environ), list(logging.getLogger().handlers), threading.active_count(), torch.get_num_threads()
for name in {names!r}:
    importlib.import_module(name)
after = dict(os.environ), list(logging.getLogger().handlers), threading.active_count(), torch.get_num_threads()
print([name for name, old, new in zip(("environment", "log handlers", "threads", "torch threads"), before, after) if old != new])
"""
    assert run_python(code) == "[]\n"
