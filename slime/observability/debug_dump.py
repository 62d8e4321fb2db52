"""Rollout dumps: the samples of one round in one torch file, saved before conversion and replayed without engines.

Invariants: a file holds `{"rollout_id": int or "eval_<n>", "samples": [Sample.to_dict()]}` made of plain containers,
numbers, strings and tensors, so that it loads with `weights_only=True`; media of samples are the same when a dump is read
here, and those that several samples share are in it once; it appears under its name only when complete.
It does not know when a round is dumped or what becomes of the samples.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from slime.utils.plain_data import Shared, fields_from_plain, fields_to_plain

if TYPE_CHECKING:
    from slime.utils.types import Sample


def save_rollout_dump(template: str, rollout_id: int | str, samples: Iterable[Sample]) -> Path:
    """Write samples to `template` with `{rollout_id}` filled in, and return the path."""
    import torch

    path = dump_path(template, rollout_id)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    shared = Shared()
    plain = [fields_to_plain(sample.to_dict(), shared, exact=False) for sample in samples]
    torch.save({"rollout_id": rollout_id, "samples": plain}, partial)
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
    rows = take_both_ends(content["samples"], subsample)
    if content["samples"] and not rows:
        raise ValueError(
            f"--load-debug-rollout-data-subsample {subsample} of the {len(content['samples'])} samples of {path} leaves none"
        )
    shared = Shared()
    return [Sample.from_dict(fields_from_plain(fields, shared)) for fields in rows]


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
