"""How prompts of the rollout and of evaluation sets are read, given the flags.

A message list stays a list when the generate hook has the list form (it edits conversations); the built-in generator
renders lists itself.
"""

from __future__ import annotations

from dataclasses import replace

from slime.utils.data import RowFormat
from slime.utils.hook_forms import generate_form
from slime.utils.misc import load_hook


def rollout_row_format(args) -> RowFormat:
    """The row format of `--prompt-data`."""
    fmt = RowFormat.from_args(args)
    if uses_list_generate(args.custom_generate_function_path):
        fmt = replace(fmt, apply_chat_template=False)
    return fmt


def uses_list_generate(path: str | None) -> bool:
    """Whether the generate hook at `path` takes a list of samples."""
    return path is not None and generate_form(load_hook(path, "custom_generate_function_path")) == "list"
