"""What a flag is: one immutable record, and how a set of records becomes an argparse parser.

Invariants: a flag is declared once; its default here is the only default; a parser never guesses abbreviations.
It does not know which flags exist (section files), which are built (status.py) or how values depend on each other.
"""

from __future__ import annotations

import argparse
import ast
import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any


class UserError(ValueError):
    """A mistake of the person who wrote the command line or a configuration file; the text names flag and value."""


class UserTypeError(UserError, TypeError):
    """A value of the wrong kind in a configuration file, where TypeError is the documented error."""


@dataclass(frozen=True)
class Flag:
    """One command line flag.

    name: spelling with dashes, e.g. ``--rollout-batch-size``. dest: attribute on args (derived from the name if empty).
    type: "str", "int", "float", "json" (object), "path" (made absolute), "hook" (dotted or file path of a callable),
    "lower" (case does not count), "pattern" (per-layer list expression).
    action: "store", "true" (switch on), "false" (switch dest off), "bool" (``--x`` / ``--no-x``), "append" (repeatable).
    section: heading of the help. owner: file or folder of the tree that reads the value.
    src: where the name comes from (S seed, s seed capability, U upstream, X seed only, M Megatron, G SGLang, R router, O ours).
    status: "live", "noop" (accepted and logged, means nothing here) or "unbuilt" (refused when used); reason says why.
    """

    name: str
    help: str
    type: str = "str"
    default: Any = None
    dest: str = ""
    nargs: str | int | None = None
    choices: tuple | None = None
    action: str = "store"
    aliases: tuple[str, ...] = ()
    section: str = ""
    owner: str = ""
    src: str = ""
    status: str = "live"
    reason: str = ""

    def __post_init__(self):
        if not self.dest:
            object.__setattr__(self, "dest", self.name.removeprefix("--").replace("-", "_"))


def section(name: str, owner: str, flags: Iterable[Flag]) -> tuple[Flag, ...]:
    """Stamp the heading, and the owner where a flag names none, on a list of flags."""
    stamped = []
    for flag in flags:
        values = {**flag.__dict__, "section": name, "owner": flag.owner or owner}
        stamped.append(Flag(**values))
    return tuple(stamped)


def json_object(text: str) -> dict:
    """Parse a JSON object given on the command line."""
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not JSON ({error})") from None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"{text!r} is not a JSON object")
    return value


def integer(text: str) -> int:
    """Parse an integer; 1_000 is fine, 1.5 is not."""
    return int(text)


def layer_pattern(text: str) -> int | list[int]:
    """Parse a per-layer pattern: an interval such as ``4``, or a list expression such as ``[0]*3+[1]*58``.

    >>> layer_pattern("[0]*1+[1]*2")
    [0, 1, 1]
    """
    try:
        return _pattern_value(ast.parse(text, mode="eval").body)
    except (SyntaxError, TypeError):
        raise ValueError(text) from None


def _pattern_value(node: ast.AST):
    """Evaluate integers, lists of them, ``+`` and ``*``; nothing else."""
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    if isinstance(node, ast.List):
        return [_pattern_value(item) for item in node.elts]
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add | ast.Mult):
        left, right = _pattern_value(node.left), _pattern_value(node.right)
        return left + right if isinstance(node.op, ast.Add) else left * right
    raise TypeError(node)


integer.__name__ = "int"
layer_pattern.__name__ = "layer pattern"
TYPES: dict[str, Callable[[str], Any]] = {
    "str": str,
    "int": integer,
    "float": float,
    "json": json_object,
    "path": str,
    "hook": str,
    "lower": str.lower,
    "pattern": layer_pattern,
}


class SlimeParser(argparse.ArgumentParser):
    """Argument parser without abbreviations whose complaints are raised as UserError."""

    def __init__(self):
        super().__init__(prog="train.py", add_help=False, allow_abbrev=False, conflict_handler="error")
        self._formatter = argparse.HelpFormatter(prog="train.py", width=120)

    def _get_formatter(self) -> argparse.HelpFormatter:
        """Give one formatter: argparse asks for it at every flag, and help is rendered elsewhere."""
        return self._formatter

    def error(self, message: str):
        raise UserError(message)


def add_flag(parser: argparse.ArgumentParser, flag: Flag) -> None:
    """Register a flag unless a caller's own flag already took its spelling."""
    names = [name for name in (flag.name, *flag.aliases) if name not in parser._option_string_actions]
    if not names or flag.name not in names:
        return
    common: dict[str, Any] = {"dest": flag.dest, "default": flag.default, "help": flag.help}
    if flag.action == "true":
        parser.add_argument(*names, action="store_true", **common)
    elif flag.action == "false":
        parser.add_argument(*names, action="store_false", **common)
    elif flag.action == "bool":
        parser.add_argument(*names, action=argparse.BooleanOptionalAction, **common)
    else:
        action = "append" if flag.action == "append" else "store"
        parser.add_argument(
            *names, action=action, type=TYPES[flag.type], nargs=flag.nargs, choices=flag.choices, **common
        )
