"""Paths on the command line: made absolute once, so that every process of the run means the same file."""

from __future__ import annotations

import argparse
import os
import re

from slime.config.registry import framework_flags

_SLICE = re.compile(r"^(?P<path>.*?)@\[(?P<slice>[^\]]*)\]$")
_FILE_HOOK = re.compile(r"^(?P<path>.+\.py)(?::(?P<attribute>[A-Za-z_][\w.]*))?$")


def absolute(path: str) -> str:
    """Expand ~ and make a path absolute."""
    return os.path.abspath(os.path.expanduser(path))


def split_slice(path: str) -> tuple[str, str | None]:
    """Split ``data.jsonl@[a:b]`` into the file and ``a:b``."""
    match = _SLICE.match(path)
    return (match["path"], match["slice"]) if match else (path, None)


def split_file_hook(value: str) -> tuple[str, str | None] | None:
    """Split ``file.py`` or ``file.py:attribute``; None for a dotted path."""
    match = _FILE_HOOK.match(value)
    return (match["path"], match["attribute"]) if match else None


def absolute_hook(value: str) -> str:
    """Make the file of ``file.py[:attribute]`` absolute; dotted paths stay."""
    parts = split_file_hook(value)
    if parts is None:
        return value
    path, attribute = parts
    return absolute(path) + (f":{attribute}" if attribute else "")


def make_paths_absolute(args: argparse.Namespace) -> None:
    """Make every path and file hook of the framework's flags absolute, and the file in `--spec`."""
    for flag in framework_flags():
        value = getattr(args, flag.dest)
        if flag.type not in ("path", "hook") or not value:
            continue
        convert = absolute if flag.type == "path" else absolute_hook
        setattr(args, flag.dest, [convert(item) for item in value] if isinstance(value, list) else convert(value))
    if args.spec:
        args.spec = [absolute_hook(args.spec[0]), *args.spec[1:]]
