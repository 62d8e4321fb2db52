"""`slime ledger DIR`: what became of every prompt, read from a checkpoint, and whether it adds up."""

from __future__ import annotations

import json
import os
import pickle
from typing import Any

from slime.config import checkpoint_dirs
from slime.rollout import data_state
from slime.rollout.data_ledger import OUTCOMES
from slime.rollout.ledger_check import PLACES, LedgerReport, check

MAX_SHOWN = 20
COLUMNS = ("epoch", "prompts", "handed_out", *OUTCOMES, *PLACES)


def run(directory: str, as_json: bool = False) -> int:
    """Print the table and what does not add up. Returns the exit status: 0, or 1 when something is wrong.

    Raises:
        FileNotFoundError: no checkpoint with a Data Buffer there. ValueError: its file is damaged, or another kind of file.
    """
    checkpoint, path = find_state(directory)
    report = _report(path)
    if as_json:
        print(json.dumps({"checkpoint": checkpoint, **vars(report)}))
    else:
        print(f"prompts in {checkpoint}\n{table(report)}")
    return 1 if report.problems else 0


def _report(path: str) -> LedgerReport:
    import torch

    try:
        state = torch.load(path, weights_only=True)
    except Exception as error:  # torch has no one type for it
        what = type(error).__name__
        if not isinstance(error, pickle.UnpicklingError):  # that one advises to load any file as code
            what += f": {error!s:.200}"
        raise ValueError(f"{path} cannot be read; it is damaged or no Data Buffer: {what}") from error
    try:
        return check(state)
    except (KeyError, TypeError, AttributeError, IndexError, ValueError) as error:
        raise ValueError(
            f"{path} holds no ledger as a Data Buffer writes it: {type(error).__name__}: {error}"
        ) from error


def find_state(directory: str) -> tuple[str, str]:
    """(checkpoint directory, its Data Buffer) of a run directory, a checkpoint folder, one checkpoint, or a state file."""
    if os.path.isfile(directory):
        return directory, directory
    for folder in (directory, os.path.join(directory, "checkpoints"), _save_of(directory)):
        found = checkpoint_dirs.latest(folder)
        if found is not None:
            path = os.path.join(found.directory, data_state.FILE)
            if not os.path.exists(path):
                raise FileNotFoundError(f"{found.directory} holds no {data_state.FILE}: nothing to account for")
            return found.directory, path
    raise FileNotFoundError(
        f"{directory}: no complete checkpoint here or in its folder checkpoints/; give a run directory, the folder of --save, "
        "or one iter_N directory (the ledger is written with each checkpoint)"
    )


def _save_of(directory: str) -> str | None:
    """The `--save` of a run directory's run."""
    path = os.path.join(directory, "config.yaml")
    if not os.path.isfile(path):
        return None
    import yaml

    with open(path, encoding="utf-8") as file:
        values = yaml.safe_load(file)
    return values.get("save") if isinstance(values, dict) else None


def table(report: LedgerReport) -> str:
    """The report as text."""
    rows = [[_cell(name, line[name]) for name in COLUMNS] for line in report.lines]
    heads = [name.replace("_", " ") for name in COLUMNS]
    widths = [max(len(head), *(len(row[i]) for row in rows)) if rows else len(head) for i, head in enumerate(heads)]
    lines = ["  ".join(text.rjust(width) for text, width in zip(row, widths, strict=True)) for row in (heads, *rows)]
    if report.reused:
        lines.append(f"trained once more from the buffer: {report.reused} groups")
    if not report.problems:
        lines.append("every prompt handed out ended once or is open once")
        return "\n".join(lines)
    lines.append(f"{len(report.problems)} things do not add up:")
    lines += [f"  {problem}" for problem in report.problems[:MAX_SHOWN]]
    if len(report.problems) > MAX_SHOWN:
        lines.append(f"  and {len(report.problems) - MAX_SHOWN} more (--json shows all)")
    return "\n".join(lines)


def _cell(name: str, value: Any) -> str:
    if value is None:
        return "no rows" if name == "epoch" else "-"
    return str(value)
