"""Print the line budget: Python files, lines and code lines per package, and the largest files and functions.

It reads the working tree only. Code lines are lines that hold neither only a comment nor only blanks.
"""

from __future__ import annotations

import argparse
import ast
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SKIPPED = {".venv", ".git", "build", "dist", "outputs", "__pycache__"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--top", type=int, default=10, help="how many of the largest files and functions to show")
    top = parser.parse_args().top
    files = {path: path.read_text(encoding="utf-8") for path in python_files(ROOT)}
    print_packages(files)
    print_largest("files", [(text.count("\n"), where(path)) for path, text in files.items()], top)
    library = {path: text for path, text in files.items() if path.is_relative_to(ROOT / "slime")}
    print_largest(
        "functions of slime/", [item for path, text in library.items() for item in functions(path, text)], top
    )


def python_files(root: Path) -> Iterator[Path]:
    """Yield the project's Python files in a stable order."""
    for path in sorted(root.rglob("*.py")):
        if not SKIPPED.intersection(path.relative_to(root).parts):
            yield path


def print_packages(files: dict[Path, str]) -> None:
    totals: dict[str, list[int]] = defaultdict(lambda: [0, 0, 0])
    for path, text in files.items():
        for name in {package_of(path), "all slime" if package_of(path).startswith("slime") else "all else"}:
            totals[name][0] += 1
            totals[name][1] += text.count("\n")
            totals[name][2] += num_code_lines(text)
    print(f"{'package':<32}{'files':>7}{'lines':>8}{'code':>8}")
    for name, counts in sorted(totals.items()):
        print(f"{name:<32}{counts[0]:>7}{counts[1]:>8}{counts[2]:>8}")


def package_of(path: Path) -> str:
    """Return the first two folders of a file, or `.` for a script in the root."""
    return "/".join(path.relative_to(ROOT).parts[:-1][:2]) or "."


def num_code_lines(text: str) -> int:
    return sum(1 for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#"))


def functions(path: Path, text: str) -> Iterator[tuple[int, str]]:
    """Yield (lines, place) of every function, decorators not counted."""
    for node in ast.walk(ast.parse(text, filename=str(path))):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield node.end_lineno - node.lineno + 1, f"{where(path)}:{node.lineno} {node.name}"


def where(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def print_largest(what: str, items: list[tuple[int, str]], top: int) -> None:
    print(f"\nlargest {what}")
    for lines, name in sorted(items, reverse=True)[:top]:
        print(f"{lines:>6}  {name}")


if __name__ == "__main__":
    main()
