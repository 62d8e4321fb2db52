"""Check an implementation of the algorithms against the reference vectors, and print pass or fail per vector.

python -m tools.vectors                                  # this package, through tests/parity/vector_adapter.py
python -m tools.vectors --adapter my_package.my_adapter  # another implementation
python -m tools.vectors --adapter my_package.my_adapter --only gspo,whiten

An adapter is a module with a table `OPS`: operation name -> function of the vector's `inputs` (a dict of numbers and lists)
that returns a dict with at least the keys of the vector's `expected`. Values may be numbers, strings, lists, dicts, or anything
with `tolist()` (torch, numpy, jax). docs/algorithms/vectors.md lists the operations. The exit status is 1 when a vector fails
or has no function. Standard library only.
"""

from __future__ import annotations

import argparse
import importlib
import json
import math
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VECTORS = ROOT / "tests" / "assets" / "algorithm-vectors.json"
OWN_ADAPTER = "tests.parity.vector_adapter"
RELATIVE, ABSOLUTE = 1e-6, 1e-7

Ops = dict[str, Callable[[dict], dict]]


def load_vectors(path: Path = VECTORS) -> list[dict]:
    """Return the vectors: {"id", "op", "inputs", "expected"} and maybe "note"."""
    return json.loads(path.read_text(encoding="utf-8"))["vectors"]


def load_ops(adapter: str) -> Ops:
    """Import an adapter by dotted name and return its OPS.

    Raises: ValueError when the module cannot be imported or has no OPS.
    """
    try:
        module = importlib.import_module(adapter)
    except ImportError as error:
        raise ValueError(
            f"--adapter {adapter}: {error} (looked in {sys.path[:3]} and the installed packages)"
        ) from error
    if not isinstance(vars(module).get("OPS"), dict):
        raise ValueError(f"--adapter {adapter}: the module has no table OPS of operation name -> function")
    return module.OPS


def check(vector: dict, ops: Ops) -> str | None:
    """Return None when the implementation gives the expected values, else what is wrong."""
    if vector["op"] not in ops:
        return f"the adapter has no operation {vector['op']!r}"
    try:
        actual = ops[vector["op"]](vector["inputs"])
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return next(differences(plain(actual), vector["expected"], "result"), None)


def plain(value):
    """Return the value with tensors and arrays as lists."""
    if hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    return [plain(item) for item in value] if isinstance(value, (list, tuple)) else value


def differences(actual, expected, where: str) -> Iterator[str]:
    """Give every place where `actual` is not `expected`; keys that nobody expects are ignored."""
    if isinstance(expected, dict):
        for key, item in expected.items():
            if not isinstance(actual, dict) or key not in actual:
                yield f"{where}.{key} is missing"
            else:
                yield from differences(actual[key], item, f"{where}.{key}")
    elif isinstance(expected, list):
        if not isinstance(actual, list) or len(actual) != len(expected):
            yield f"{where} is {actual}, expected {expected}"
            return
        for position, item in enumerate(expected):
            yield from differences(actual[position], item, f"{where}[{position}]")
    elif not _same(actual, expected):
        yield f"{where} is {actual}, expected {expected}"


def _same(actual, expected) -> bool:
    if not isinstance(expected, (int, float)) or isinstance(expected, bool):
        return actual == expected
    if not isinstance(actual, (int, float)):
        return False
    return math.isclose(actual, expected, rel_tol=RELATIVE, abs_tol=ABSOLUTE)


def main(argv: list[str] | None = None) -> int:
    """Print one line per vector and a summary; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.vectors", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--adapter", default=OWN_ADAPTER, help="module with OPS (default: %(default)s)")
    parser.add_argument("--vectors", type=Path, default=VECTORS, help="file of vectors (default: the shipped one)")
    parser.add_argument("--only", help="operations, with commas between")
    args = parser.parse_args(argv)
    sys.path[:0] = [str(Path.cwd()), str(ROOT)]
    vectors = load_vectors(args.vectors)
    if args.only:
        wanted = set(args.only.split(","))
        unknown = wanted - {vector["op"] for vector in vectors}
        if unknown:
            parser.error(f"--only: no operation {', '.join(sorted(unknown))}")
        vectors = [vector for vector in vectors if vector["op"] in wanted]
    try:
        ops = load_ops(args.adapter)
    except ValueError as error:
        parser.error(str(error))
    failed = 0
    for vector in vectors:
        problem = check(vector, ops)
        failed += problem is not None
        print(f"pass  {vector['id']}" if problem is None else f"FAIL  {vector['id']}: {problem}")
    print(f"{len(vectors) - failed} of {len(vectors)} vectors pass ({args.adapter})")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
