"""Write slime/config/router_flags.json: the flags of the installed sglang-router, with the --router- prefix.

Run it after changing the sglang-router version; a test compares the checked-in file with what this prints.
"""

from __future__ import annotations

import argparse
import json
import sys
from importlib.metadata import version
from pathlib import Path

TARGET = Path(__file__).resolve().parent.parent / "slime" / "config" / "router_flags.json"

#: Set by the framework.
HIDDEN = ("worker_urls",)


def describe(action: argparse.Action) -> dict:
    """Give the JSON form of one argparse action."""
    kinds = {"_StoreTrueAction": "true", "_StoreFalseAction": "false", "_AppendAction": "append"}
    entry: dict = {"dest": action.dest, "action": kinds.get(type(action).__name__, "store")}
    if action.type not in (None, str):
        entry["type"] = action.type.__name__
    for key in ("default", "choices"):
        value = getattr(action, key)
        if value is not None:
            entry[key] = sorted(value) if key == "choices" else value
    if entry["action"] in ("store", "append") and action.nargs is not None:
        entry["nargs"] = action.nargs
    return entry


def snapshot() -> dict:
    """Collect the router's flags, spelled with dashes."""
    from sglang_router.router_args import RouterArgs

    parser = argparse.ArgumentParser(add_help=False)
    RouterArgs.add_cli_args(parser, use_router_prefix=True, exclude_host_port=True)
    flags = {action.option_strings[0]: describe(action) for action in parser._actions if action.dest not in HIDDEN}
    return {"sglang_router": version("sglang-router"), "flags": dict(sorted(flags.items()))}


def render() -> str:
    """Give the text of the checked-in file."""
    data = snapshot()
    rows = ",\n".join(f"  {json.dumps(name)}: {json.dumps(entry)}" for name, entry in data["flags"].items())
    return f'{{\n "sglang_router": {json.dumps(data["sglang_router"])},\n "flags": {{\n{rows}\n }}\n}}\n'


if __name__ == "__main__":
    TARGET.write_text(render())
    print(f"wrote {TARGET}", file=sys.stderr)
