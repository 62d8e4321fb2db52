"""Check plain-text rules that no linter sees: line ends, conflict marks, file size.

Usage: check_text.py [--fix] [file ...]; without files, everything that git tracks. Exits 1 when something is wrong and,
with --fix, after repairing white space.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

MAX_BYTES = 1_000_000
AS_RECORDED = Path("tests/assets")  # data kept byte for byte: only its size is checked
CONFLICT_MARKS = tuple(mark * 7 + " " for mark in "<>")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="*", type=Path)
    parser.add_argument("--fix", action="store_true", help="repair white space")
    args = parser.parse_args()
    problems = [problem for path in args.files or tracked_files() for problem in check(path, args.fix)]
    print("\n".join(problems), end="\n" if problems else "")
    return 1 if problems else 0


def tracked_files() -> list[Path]:
    """Return git's files; outside a checkout there are none to check."""
    listing = subprocess.run(["git", "ls-files", "-z"], capture_output=True, text=True, check=False)
    return [Path(name) for name in listing.stdout.split("\0") if name]


def check(path: Path, fix: bool) -> list[str]:
    """Return the problems of one file; links, missing files and binary files have none but their size."""
    if path.is_symlink() or not path.is_file():
        return []
    data = path.read_bytes()
    problems = [f"{path}: {len(data)} bytes, at most {MAX_BYTES} are allowed"] if len(data) > MAX_BYTES else []
    if b"\0" in data or path.resolve().is_relative_to(AS_RECORDED.resolve()):
        return problems
    text = data.decode("utf-8", errors="replace")
    clean = "\n".join(line.rstrip(" \t\r") for line in text.split("\n"))
    clean = clean.rstrip("\n") + "\n" if clean.strip() else ""
    if any(line.startswith(CONFLICT_MARKS) for line in text.split("\n")):
        problems.append(f"{path}: merge conflict mark")
    if clean != text:
        problems.append(f"{path}: white space at line ends, or not exactly one newline at the end")
        if fix:
            path.write_text(clean, encoding="utf-8", newline="\n")
    return problems


if __name__ == "__main__":
    sys.exit(main())
