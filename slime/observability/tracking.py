"""The one writer of a run's metrics: `metrics.jsonl`, TensorBoard events, W&B and the resolved configuration.

Invariants: only the driver process owns a Tracker; each call of `log` ends in one complete line on disk, so that a
killed run loses nothing it has logged; a line cut short by a kill is closed before the next one is written. A run that
was interrupted moves the lines of the rounds it does again to `metrics.superseded.jsonl` and takes them out of the views, so
that each round appears once. Numbers that JSON cannot hold (nan, inf) become null. Keys of accounts are written nowhere.
It does not know where metrics come from or what they mean.
"""

from __future__ import annotations

import dataclasses
import enum
import json
import math
import os
import re
import time
from pathlib import Path

METRICS_FILE = "metrics.jsonl"
SUPERSEDED_FILE = "metrics.superseded.jsonl"
CONFIG_FILE = "config.yaml"
BEFORE_TRAINING = -1  # step of an evaluation before round 0 where round 0 is evaluated too
SECRET = re.compile(r"wandb_key|.*api_?key|.*password|.*secret(_.*)?|(hf|auth|access)_token", re.IGNORECASE)


class Tracker:
    """Metrics of one run, by `args.run_dir`. Use it as a context manager or call `close()`; both may happen twice."""

    def __init__(self, args):
        self.args, self.run_dir = args, Path(args.run_dir)
        self.run_dir.mkdir(parents=True, exist_ok=True)
        dump_config(args, self.run_dir / CONFIG_FILE)
        self._file = _open_for_append(self.run_dir / METRICS_FILE)
        self._num_lines = len((self.run_dir / METRICS_FILE).read_text(encoding="utf-8").splitlines())
        self._tensorboard = _make_tensorboard(args)
        self._wandb = _make_wandb(args, self._num_lines)

    def __enter__(self) -> Tracker:
        return self

    def __exit__(self, *exc_info) -> None:
        self.close()

    def log(self, metrics: dict[str, float], step_key: str, step: int) -> None:
        """Append `metrics` at `step` of the axis `step_key` (rollout/step, train/step or eval/step).

        Raises: ValueError naming the metric whose value is not a number.
        """
        values = {name: _as_number(name, value) for name, value in metrics.items()}
        line = {"time": time.time(), "step_key": step_key, "step": int(step)}
        line.update({name: value if math.isfinite(value) else None for name, value in values.items()})
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()
        self._show_in_tensorboard(line, values)
        self._show_in_wandb(line, values, self._num_lines)
        self._num_lines += 1

    def rewind(self, rollout_id: int, steps_per_rollout: int) -> None:
        """Round `rollout_id` comes next: set aside the lines of it and of later rounds, which an earlier attempt wrote."""
        first = {"train/step": rollout_id * steps_per_rollout, "eval/step": rollout_id or BEFORE_TRAINING}
        texts = (self.run_dir / METRICS_FILE).read_text(encoding="utf-8").splitlines()
        lines = [_parsed(text) for text in texts]
        gone = [line is None or line["step"] >= first.get(line["step_key"], rollout_id) for line in lines]
        if any(gone):
            self._set_aside(texts, gone)
            self._mend_views(lines, gone)

    def _set_aside(self, texts: list[str], gone: list[bool]) -> None:
        """Leave the lines in metrics.jsonl that are not gone, and append the others to the superseded ones."""
        path = self.run_dir / METRICS_FILE
        with open(self.run_dir / SUPERSEDED_FILE, "a", encoding="utf-8") as file:
            file.writelines(text + "\n" for text, is_gone in zip(texts, gone, strict=True) if is_gone)
        partial = path.with_suffix(".tmp")
        kept = (text + "\n" for text, is_gone in zip(texts, gone, strict=True) if not is_gone)
        partial.write_text("".join(kept), encoding="utf-8")
        self._file.close()
        os.replace(partial, path)
        self._file = _open_for_append(path)

    def _mend_views(self, lines: list[dict | None], gone: list[bool]) -> None:
        """Take the gone lines out of TensorBoard and W&B. Both forget everything from some point on, so what is kept behind it is
        written there again."""
        kept = [line for line, is_gone in zip(lines, gone, strict=True) if not is_gone]
        again = [line for line, is_gone in zip(lines, gone, strict=True) if is_gone and line is not None]
        self._num_lines = len(kept)
        if self._tensorboard is not None and again:
            step = min(self._view_step(line) for line in again)
            self._tensorboard.forget_from(step)
            for line in kept:
                if self._view_step(line) >= step:
                    self._show_in_tensorboard(line, _values_of(line))
        if self._wandb is not None and again:
            for number in range(self._wandb.rewind(gone.index(True), len(kept)), len(kept)):
                self._show_in_wandb(kept[number], _values_of(kept[number]), number)

    def _view_step(self, line: dict) -> int:
        return view_step(self.args, line["step_key"], line["step"])

    def _show_in_tensorboard(self, line: dict, values: dict[str, float]) -> None:
        if self._tensorboard is not None:
            self._tensorboard.log(values, self._view_step(line), line["time"])

    def _show_in_wandb(self, line: dict, values: dict[str, float], number: int) -> None:
        if self._wandb is not None:
            self._wandb.log(values, line["step_key"], self._view_step(line), number)

    def close(self) -> None:
        """Flush and close every sink."""
        self._file.close()
        if self._tensorboard is not None:
            self._tensorboard.close()
            self._tensorboard = None
        if self._wandb is not None:
            self._wandb.close()
            self._wandb = None


def view_step(args, step_key: str, step: int) -> int:
    """Return where curves show a line: with --wandb-always-use-train-step rounds stand at their first training step.

    metrics.jsonl keeps the round's own number.
    """
    if step_key == "train/step" or not args.wandb_always_use_train_step:
        return step
    return step * args.rollout_batch_size * args.n_samples_per_prompt // args.global_batch_size


def plain_config(args) -> dict:
    """Return every attribute of `args`, derived ones too, in YAML's own types; keys of accounts and private ones are left out."""
    return _as_plain({name: value for name, value in sorted(vars(args).items()) if not name.startswith("_")})


def dump_config(args, path: Path) -> None:
    """Write `plain_config` to a YAML file for people and tools to read."""
    import yaml

    plain = plain_config(args)
    partial = path.with_suffix(path.suffix + ".tmp")
    partial.write_text(yaml.safe_dump(plain, sort_keys=False, allow_unicode=True), encoding="utf-8")
    os.replace(partial, path)


def read_metrics(run_dir: str | Path) -> list[dict]:
    """Return the lines of a run's metrics.jsonl; a last line that is still being written is left out."""
    path = Path(run_dir) / METRICS_FILE
    if not path.exists():
        return []
    lines = [_parsed(text) for text in path.read_text(encoding="utf-8").splitlines()]
    return [line for line in lines if line is not None]


def _parsed(text: str) -> dict | None:
    """Return a line of metrics.jsonl; None for one that a kill has cut short (see the module invariants)."""
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return None


def _values_of(line: dict) -> dict[str, float]:
    """Return the metrics of a line as they were logged; infinities are nan."""
    metrics = ((name, value) for name, value in line.items() if name not in ("time", "step_key", "step"))
    return {name: math.nan if value is None else value for name, value in metrics}


def _open_for_append(path: Path):
    file = open(path, "a", encoding="utf-8")
    if file.tell() > 0:
        with open(path, "rb") as reader:
            reader.seek(-1, os.SEEK_END)
            if reader.read(1) != b"\n":
                file.write("\n")
    return file


def _make_tensorboard(args):
    """Return the TensorBoard adapter; None when switched off or, where nobody asked for it, not installed."""
    if args.use_tensorboard is False:
        return None
    from slime.observability.tensorboard_utils import _TensorboardAdapter, is_tensorboard_available

    if args.use_tensorboard is None and not is_tensorboard_available():
        return None
    return _TensorboardAdapter(args)


def _make_wandb(args, num_lines: int):
    """Return the W&B adapter; None unless asked for."""
    if not args.use_wandb:
        return None
    from slime.observability.wandb_utils import WandbAdapter

    return WandbAdapter(args, plain_config(args), num_lines)


def _as_number(name: str, value) -> float:
    """Return `value` (number, bool, or one-element tensor or array) as float or int."""
    if hasattr(value, "item"):
        value = value.item()
    if isinstance(value, bool):
        return int(value)
    if isinstance(value, (int, float)):
        return value
    raise ValueError(f"metric {name!r} must be one number, got {type(value).__name__}: {value!r}")


def _as_plain(value):
    """Return `value` made of YAML's own types, without the entries that are keys of accounts."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, enum.Enum):
        return _as_plain(value.value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {str(key): _as_plain(item) for key, item in value.items() if not SECRET.fullmatch(str(key))}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [_as_plain(item) for item in value]
    return str(value)
