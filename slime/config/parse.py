"""From a command line to one namespace: command line > --config file > default.

``parse_args`` is the entry of the drivers; ``parse_raw`` stops before derived values and checks (help tools, tests).
Mistakes of the user are UserError; on a real command line they end the program with one clean message and status 2.
It does not know what the flags mean: resolve.py derives, validate.py checks.
"""

from __future__ import annotations

import argparse
import copy
import difflib
import importlib.util
import sys
from collections.abc import Callable
from functools import lru_cache
from typing import Any

from slime.config import registry
from slime.config.help_text import render_help
from slime.config.spec import SlimeParser, UserError, add_flag
from slime.config.yaml_file import file_values

#: SGLang server arguments that the framework sets itself; they get no flag.
SGLANG_HIDDEN = frozenset(
    """model_path config trust_remote_code random_seed enable_memory_saver tp_size port nnodes node_rank dist_init_addr
    gpu_id_step base_gpu_id nccl_port skip_server_warmup enable_return_routed_experts help""".split()
)
AddArguments = Callable[[argparse.ArgumentParser], Any]


class _Prefixed:
    """Parser view that registers the flags of the installed SGLang under --sglang- names."""

    def __init__(self, parser: argparse.ArgumentParser):
        self._parser = parser

    def add_argument(self, *names: str, **options):
        """Register one server flag unless the framework owns it or it is known."""
        names = tuple(name for name in names if name.startswith("--"))
        dest = options.pop("dest", None) or (names[0][2:].replace("-", "_") if names else "")
        spelled = [f"--sglang-{name[2:]}" for name in names]
        spelled = [name for name in spelled if name not in self._parser._option_string_actions]
        if dest in SGLANG_HIDDEN or not spelled:
            return None
        options.pop("required", None)
        if dest in ("log_level", "log_level_http"):
            options["type"] = str.lower
        return self._parser.add_argument(*spelled, dest=f"sglang_{dest}", **options)

    def add_argument_group(self, *_args, **_options) -> _Prefixed:
        """Groups only matter for SGLang's own help."""
        return self

    def add_mutually_exclusive_group(self, *_args, **_options) -> _Prefixed:
        """Exclusion is checked by the server."""
        return self


def _add_installed_sglang(parser: argparse.ArgumentParser) -> bool:
    """Register the flags of the installed SGLang, where there is one; the recorded ones fill what it lacks."""
    if importlib.util.find_spec("sglang") is None:
        return False
    from sglang.srt.server_args import ServerArgs

    ServerArgs.add_cli_args(_Prefixed(parser))
    return True


def build_parser(add_custom_arguments: AddArguments | None = None) -> SlimeParser:
    """Build the parser of every flag; the caller's flags come first, so that their spelling wins."""
    parser = SlimeParser()
    if add_custom_arguments is not None:
        add_custom_arguments(parser)
    for flag in registry.framework_flags() + registry.megatron_flags_added():
        add_flag(parser, flag)
    _add_installed_sglang(parser)
    for flag in registry.sglang_flags() + registry.router_flags():
        add_flag(parser, flag)
    return parser


def _defaults(parser: argparse.ArgumentParser) -> dict[str, Any]:
    """Take the defaults out of the parser, so that parsing shows only what was given."""
    values: dict[str, Any] = {}
    for action in parser._actions:
        if action.dest is argparse.SUPPRESS or action.default is argparse.SUPPRESS:
            continue
        default = action.default
        if isinstance(default, str) and action.type is not None:
            default = parser._get_value(action, default)
        values.setdefault(action.dest, default)
        action.default = argparse.SUPPRESS
    values |= parser._defaults
    parser._defaults.clear()
    return values


@lru_cache(maxsize=1)
def standard_parser() -> tuple[SlimeParser, dict[str, Any]]:
    """Give the parser without a caller's flags, and the defaults that were taken out of it; built once."""
    parser = build_parser()
    return parser, _defaults(parser)


def _parser_and_defaults(add_custom_arguments: AddArguments | None) -> tuple[SlimeParser, dict[str, Any]]:
    """Give a parser and fresh copies of its defaults."""
    if add_custom_arguments is None:
        parser, defaults = standard_parser()
    else:
        parser = build_parser(add_custom_arguments)
        defaults = _defaults(parser)
    return parser, copy.deepcopy(defaults)


def _unknown_message(unknown: list[str], parser: argparse.ArgumentParser) -> str:
    """Say which words were not understood, each flag with the nearest known one; the values of a flag go with it."""
    known = list(parser._option_string_actions)
    lines = []
    for position, word in enumerate(unknown):
        if word.startswith("-"):
            name = word.split("=")[0]
            near = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
            lines.append(f"unknown flag {name}" + (f" (did you mean {near[0]}?)" if near else ""))
        elif not any(earlier.startswith("-") for earlier in unknown[:position]):
            lines.append(f"unexpected value {word}")
    return "; ".join(lines)


def parse_raw(
    argv: list[str] | None = None, add_custom_arguments: AddArguments | None = None
) -> tuple[argparse.Namespace, set[str], list[str]]:
    """Parse without deriving or checking.

    Returns: args with every flag, the attributes that were given on the command line or in the --config file, and
    notes to be said at start.
    """
    words = sys.argv[1:] if argv is None else list(argv)
    parser, defaults = _parser_and_defaults(add_custom_arguments)
    given, unknown = parser.parse_known_args(words)
    notes: list[str] = []
    if unknown:
        message = _unknown_message(unknown, parser)
        if not getattr(given, "allow_unknown_args", False):
            raise UserError(message)
        notes.append(f"ignored because of --allow-unknown-args: {message}")
    from_file: dict[str, Any] = {}
    if "config" in vars(given) and given.config:
        from_file = file_values(given.config, parser, notes)
    values = {**defaults, **from_file, **vars(given)}
    return argparse.Namespace(**values), set(from_file) | set(vars(given)), notes


def parse_args(
    argv: list[str] | AddArguments | None = None, add_custom_arguments: AddArguments | None = None
) -> argparse.Namespace:
    """Parse, derive and check the arguments of a run.

    Args:
        argv: words after the program name; None reads the real command line. A function here is `add_custom_arguments`.
        add_custom_arguments: called with the parser before the framework's flags are added.
    Returns: the namespace that every process of the run gets; ``args.start_notes`` says what was assumed.
    Raises: UserError (a ValueError) for a mistake in the arguments, when argv is given.
    """
    from slime.config.resolve import resolve

    if callable(argv):
        argv, add_custom_arguments = None, argv
    words = sys.argv[1:] if argv is None else list(argv)
    if "--help" in words or "-h" in words or "--help-all" in words:
        print(render_help(everything="--help-all" in words, parser=_help_parser(add_custom_arguments)))
        raise SystemExit(0)
    try:
        args, given, notes = parse_raw(words, add_custom_arguments)
        return resolve(args, given, notes)
    except UserError as error:
        if argv is not None:
            raise
        print(f"slime: error: {error}", file=sys.stderr)
        raise SystemExit(2) from None


def _help_parser(add_custom_arguments: AddArguments | None) -> SlimeParser | None:
    """Give a parser that holds only the caller's own flags, for the help."""
    if add_custom_arguments is None:
        return None
    parser = SlimeParser()
    add_custom_arguments(parser)
    return parser
