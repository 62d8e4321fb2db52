"""Help text grouped by section, rendered from the declarations without building the parser."""

from __future__ import annotations

import argparse
import textwrap

from slime.config import registry
from slime.config.spec import Flag

HEAD = """usage: python train.py [flags]

Reinforcement learning of language models: Megatron trains, engines generate, a Data Buffer stands between them.
Flags may stand in a YAML file too (--config run.yaml): command line > file > default.
Megatron's flags are given bare, SGLang's with --sglang-, the router's with --router-; --help-all lists them.
"""


def value_hint(flag: Flag) -> str:
    """Show what follows the flag."""
    if flag.action in ("true", "false"):
        return ""
    if flag.action == "bool":
        return "(and --no- form)"
    hint = "{" + ",".join(map(str, flag.choices)) + "}" if flag.choices else flag.type.upper()
    return f"{hint} ..." if flag.nargs in ("+", "*") else hint


def default_hint(flag: Flag) -> str:
    """Show the default where there is one worth saying."""
    if flag.action in ("true", "false") or flag.default in (None, [], {}):
        return ""
    return f" [{flag.default}]"


def _entry(flag: Flag) -> str:
    """Render one flag."""
    state = {"live": "", "noop": " (no effect: %s)", "unbuilt": " (not built: %s)"}[flag.status]
    text = flag.help + default_hint(flag) + (state % flag.reason if state else "")
    head = f"  {flag.name} {value_hint(flag)}".rstrip()
    return head + "\n" + textwrap.fill(text, 112, initial_indent=" " * 8, subsequent_indent=" " * 8)


def render_help(everything: bool = False, parser: argparse.ArgumentParser | None = None) -> str:
    """Render the help of the framework's flags, or of all flags; parser holds a caller's own flags."""
    flags = registry.all_flags() if everything else registry.framework_flags()
    lines = [HEAD]
    if parser is not None:
        lines.append("flags of this program")
        lines += [f"  {'  '.join(a.option_strings)}\n        {a.help or ''}" for a in parser._actions]
    current = None
    for flag in flags:
        if flag.section != current:
            lines.append(f"\n{flag.section}")
            current = flag.section
        if flag.section in ("SGLang", "router") and flag.status == "live":
            lines.append(f"  {flag.name} {value_hint(flag)}{default_hint(flag)}".rstrip())
        else:
            lines.append(_entry(flag))
    return "\n".join(lines)
