"""Rollout dumps: the samples of one round in one torch file, saved before conversion and replayed without engines.

Invariants: a file holds `{"rollout_id": int or "eval_<n>", "samples": [Sample.to_dict()]}` made of plain containers,
numbers, strings and tensors, so that it loads with `weights_only=True`; it appears under its name only when complete.
It does not know when a round is dumped or what becomes of the samples.
"""

from __future__ import annotations

import enum
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from slime.utils.types import Sample


def save_rollout_dump(template: str, rollout_id: int | str, samples: Iterable[Sample]) -> Path:
    """Write samples to `template` with `{rollout_id}` filled in, and return the path."""
    import torch

    path = dump_path(template, rollout_id)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    torch.save({"rollout_id": rollout_id, "samples": [_as_plain(s.to_dict()) for s in samples]}, partial)
    os.replace(partial, path)
    return path


def load_rollout_dump(template: str, rollout_id: int | str, subsample: float | None = None) -> list[Sample]:
    """Read the samples of a dump.

    Args:
        subsample: share of the samples to keep, (0, 1]; half from the beginning and half from the end.

    Raises: ValueError when the file is missing or no rollout dump.
    """
    import torch

    from slime.utils.types import Sample

    path = dump_path(template, rollout_id)
    if not path.exists():
        raise ValueError(f"--load-debug-rollout-data: no dump for round {rollout_id} at {path}")
    content = torch.load(path, weights_only=True)
    if not isinstance(content, dict) or "samples" not in content:
        raise ValueError(f"--load-debug-rollout-data: {path} is no rollout dump (it has no entry 'samples')")
    return [Sample.from_dict(fields) for fields in take_both_ends(content["samples"], subsample)]


def take_both_ends(rows: Sequence, share: float | None) -> Sequence:
    """Return int(len × share) rows, the first half from the beginning and the rest from the end."""
    if share is None:
        return rows
    if not 0 < share <= 1:
        raise ValueError(f"--load-debug-rollout-data-subsample must lie in (0, 1], got {share}")
    count = int(len(rows) * share)
    head = count // 2
    return list(rows[:head]) + list(rows[len(rows) - (count - head) :])


def dump_path(template: str, rollout_id: int | str) -> Path:
    """Return the path of a round's dump."""
    return Path(template.format(rollout_id=rollout_id))


def _as_plain(value):
    """Return `value` made of types that a weights-only load accepts; arrays become tensors, other objects their text."""
    import torch

    if isinstance(value, enum.Enum):
        return _as_plain(value.value)
    if isinstance(value, torch.Tensor):
        return value.detach().cpu()
    if value is None or type(value) in (bool, int, float, str, bytes):
        return value
    if isinstance(value, Mapping):
        return {_as_plain(key): _as_plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_as_plain(item) for item in value]
    if isinstance(value, (tuple, set, frozenset)):
        items = [_as_plain(item) for item in value]
        return tuple(items) if isinstance(value, tuple) else items
    return _array_or_text(value)


def _array_or_text(value):
    import numpy
    import torch

    if isinstance(value, numpy.generic):
        return value.item()
    if isinstance(value, numpy.ndarray) and value.dtype.kind in "biuf":
        return torch.from_numpy(value.copy())
    if isinstance(value, numpy.ndarray):
        return _as_plain(value.tolist())
    return str(value)
