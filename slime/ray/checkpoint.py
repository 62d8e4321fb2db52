"""Checkpoints of a run: one directory each, complete or ignored.

``<save>/iter_0000010/`` holds the trainer's state, ``data_buffer.pt`` and, written last, ``manifest.json``; then
``latest_checkpointed_iteration.txt`` names it. A directory without a manifest was cut short and is never loaded.
"""

from __future__ import annotations

import json
import logging
import os
import re
import time
from dataclasses import dataclass

logger = logging.getLogger(__name__)

MANIFEST = "manifest.json"
LATEST = "latest_checkpointed_iteration.txt"
_FORMAT = 1


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint: ``rollout_id`` is the last round trained into it."""

    directory: str
    rollout_id: int
    weight_version: int


def directory_of(root: str, rollout_id: int) -> str:
    return os.path.join(root, f"iter_{rollout_id:07d}")


def commit(directory: str, *, rollout_id: int, weight_version: int) -> None:
    """Declare everything in ``directory`` complete."""
    _write_atomically(
        os.path.join(directory, MANIFEST),
        json.dumps(
            {
                "format": _FORMAT,
                "rollout_id": rollout_id,
                "weight_version": weight_version,
                "files": sorted(os.listdir(directory)),
                "saved_at": time.time(),
            },
            indent=1,
        ),
    )
    _write_atomically(os.path.join(os.path.dirname(directory), LATEST), str(rollout_id))


def latest(root: str | None) -> Checkpoint | None:
    """Newest complete checkpoint below ``root``, or ``root`` itself; None when there is none.

    Half-written directories newer than it are named in a warning.
    """
    if not root or not os.path.isdir(root):
        return None
    if os.path.exists(os.path.join(root, MANIFEST)):
        return _read(root)
    names = sorted((name for name in os.listdir(root) if re.fullmatch(r"iter_\d{7}", name)), reverse=True)
    for name in names:
        directory = os.path.join(root, name)
        if os.path.exists(os.path.join(directory, MANIFEST)):
            return _read(directory)
        logger.warning("%s has no %s: it was cut short and is ignored", directory, MANIFEST)
    return None


def _read(directory: str) -> Checkpoint:
    with open(os.path.join(directory, MANIFEST), encoding="utf-8") as file:
        manifest = json.load(file)
    missing = sorted(set(manifest["files"]) - set(os.listdir(directory)))
    if missing:
        raise RuntimeError(f"checkpoint {directory} lost files that its {MANIFEST} lists: {missing}")
    return Checkpoint(directory, manifest["rollout_id"], manifest["weight_version"])


def _write_atomically(path: str, text: str) -> None:
    partial = f"{path}.tmp"
    with open(partial, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)
