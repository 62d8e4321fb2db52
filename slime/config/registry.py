"""Every flag in one place: the framework's sections, Megatron's, SGLang's and the router's, each with its status.

Invariants: one flag per name and per attribute; the framework's declaration wins over Megatron's of the same name.
Nothing outside the standard library is needed.
"""

from __future__ import annotations

import dataclasses
import json
from functools import lru_cache
from pathlib import Path

from slime.config import algorithm, cluster, lora, megatron_flags, observe, rollout, train
from slime.config.spec import Flag
from slime.config.status import NOOP, UNBUILT

FOLDER = Path(__file__).parent

#: Router flags whose default differs from the router's own.
ROUTER_DEFAULTS = {
    "router_log_level": "warn",
    "router_balance_abs_threshold": 10,
    "router_balance_rel_threshold": 1.2,
}
#: Policies of newer routers, and of the pass-through router here.
EXTRA_POLICIES = ("consistent_hashing",)


def _with_status(flag: Flag) -> Flag:
    """Stamp the status that status.py gives a framework flag."""
    if flag.dest in NOOP:
        return dataclasses.replace(flag, status="noop", reason=NOOP[flag.dest])
    if flag.dest in UNBUILT:
        return dataclasses.replace(flag, status="unbuilt", reason=UNBUILT[flag.dest][0])
    return flag


@lru_cache(maxsize=1)
def framework_flags() -> tuple[Flag, ...]:
    """Give the framework's own flags in the order of the help."""
    sections = cluster.FLAGS + rollout.FLAGS + algorithm.FLAGS + train.FLAGS + lora.FLAGS + observe.FLAGS
    return tuple(_with_status(flag) for flag in sections)


def _snapshot_flags(file_name: str, section: str, owner: str, src: str) -> list[Flag]:
    """Read recorded flags of an external program."""
    entries = json.loads((FOLDER / file_name).read_text())["flags"]
    return [
        Flag(
            name=name,
            help=f"{section} flag",
            dest=entry["dest"],
            type=entry.get("type", "str"),
            default=entry.get("default"),
            nargs=entry.get("nargs") if entry["action"] in ("store", "append") else None,
            choices=tuple(entry["choices"]) if "choices" in entry else None,
            action=entry["action"],
            aliases=tuple(entry.get("aliases", ())),
            section=section,
            owner=owner,
            src=src,
        )
        for name, entry in entries.items()
    ]


@lru_cache(maxsize=1)
def router_flags() -> tuple[Flag, ...]:
    """Give the router's flags with the framework's defaults."""
    flags = []
    for flag in _snapshot_flags("router_flags.json", "router", "slime/ray/router.py", "R"):
        if flag.dest in ROUTER_DEFAULTS:
            flag = dataclasses.replace(flag, default=ROUTER_DEFAULTS[flag.dest])
        if flag.dest == "router_policy":
            flag = dataclasses.replace(flag, choices=(*flag.choices, *EXTRA_POLICIES), src="s")
        flags.append(flag)
    return tuple(flags)


@lru_cache(maxsize=1)
def sglang_flags() -> tuple[Flag, ...]:
    """Give the recorded server flags of SGLang with the --sglang- prefix."""
    return tuple(_snapshot_flags("sglang_flags.json", "SGLang", "slime/ray", "G"))


@lru_cache(maxsize=1)
def megatron_flags_added() -> tuple[Flag, ...]:
    """Give Megatron's flags that the framework does not declare itself."""
    own_names = {flag.name for flag in framework_flags()}
    own_dests = {flag.dest for flag in framework_flags()}
    return tuple(f for f in megatron_flags.flags() if f.name not in own_names and f.dest not in own_dests)


def all_flags() -> tuple[Flag, ...]:
    """Give every flag that the parser knows when SGLang is not installed."""
    return framework_flags() + megatron_flags_added() + sglang_flags() + router_flags()


@lru_cache(maxsize=1)
def by_dest() -> dict[str, tuple[Flag, ...]]:
    """Map an attribute of args to the flags that set it."""
    table: dict[str, tuple[Flag, ...]] = {}
    for flag in all_flags():
        table[flag.dest] = (*table.get(flag.dest, ()), flag)
    return table


def spelling(dest: str) -> str:
    """Give the flag that sets an attribute, for messages."""
    flags = by_dest().get(dest)
    return flags[0].name if flags else "--" + dest.replace("_", "-")
