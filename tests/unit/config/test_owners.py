"""Every live flag is read by the part of the tree that its declaration names."""

from __future__ import annotations

import re
import warnings
from functools import cache
from pathlib import Path

import pytest

from slime.config import megatron_flags, registry

ROOT = Path(__file__).resolve().parents[3]

#: Live flags that no file of the tree has to read, with the reason. Shrink it, never grow it.
ALLOWED = {
    "max_turns": "read by custom generation functions of users",
    "train_backend": "one choice only",
}
#: Configuration classes whose fields the trainer fills from arguments of the same name.
FORWARDED = ("TransformerConfig", "OptimizerConfig")


@cache
def owner_text(owner: str) -> str:
    """Give the code of an owner, a file or a folder; declarations do not count as reading."""
    path = ROOT / owner
    files = sorted(path.rglob("*.py")) if path.is_dir() else [path]
    if path == ROOT / "slime":
        files = [file for file in files if ROOT / "slime" / "config" not in file.parents]
    return "\n".join(file.read_text() for file in files)


def is_forwarded(dest: str) -> bool:
    """Say whether the trainer copies the argument into a configuration class without naming it."""
    classes = megatron_flags.recorded_fields().get(dest, {}).get("classes", [])
    code = owner_text(megatron_flags.OWNER)
    return any(name in classes and f"dataclasses.fields({name})" in code for name in FORWARDED)


def unread(flags) -> dict[str, str]:
    """Give the live flags whose owner does not mention their attribute."""
    missing = {}
    for flag in flags:
        if flag.status != "live":
            continue
        if not re.search(rf"\b{re.escape(flag.dest)}\b", owner_text(flag.owner)) and not is_forwarded(flag.dest):
            missing[flag.dest] = flag.owner
    return missing


FLAGS = registry.framework_flags() + registry.megatron_flags_added()


@pytest.mark.parametrize("owner", sorted({flag.owner for flag in FLAGS if flag.status == "live"}))
def test_live_flags_are_read_by_their_owner(owner):
    if not (ROOT / owner).exists():
        pytest.xfail(f"{owner} does not exist yet")
    missing = unread(flag for flag in FLAGS if flag.owner == owner)
    unknown = {dest for dest in missing if dest not in ALLOWED}
    assert not unknown, f"{owner} does not read {sorted(unknown)}: read them, or give them an entry in status.py"


def test_allow_list_holds_only_flags_that_nobody_reads():
    stale = sorted(set(ALLOWED) - set(unread(flag for flag in FLAGS if (ROOT / flag.owner).exists())))
    if stale:
        warnings.warn(f"the allow-list can shrink: {stale} are read now", stacklevel=1)
    assert set(ALLOWED) <= {flag.dest for flag in FLAGS}
