"""Writing checkpoints of a run: one directory each, complete or ignored.

``begin`` gives a directory ``iter_0000010.partial-<token>`` to write into. ``commit`` brings everything in it to the disk, adds
``manifest.json``, renames it to ``iter_0000010`` and then names it in ``latest_checkpointed_iteration.txt``. A run killed at any
point of this leaves the former checkpoint in place and chosen. Which one counts: ``slime/config/checkpoint_dirs.py``.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
import time
import uuid
from collections.abc import Iterator

from slime.config import checkpoint_dirs as dirs

logger = logging.getLogger(__name__)


LOW_SPACE = 1 << 28
"""Bytes; with fewer than these free, a failed save says how many are left."""


@contextlib.contextmanager
def telling_free_space(root: str) -> Iterator[None]:
    """Writers say little about a full disk: add what is free to the error of a save inside.

    Raises: RuntimeError instead of RuntimeError and OSError where space is low.
    """
    try:
        yield
    except (RuntimeError, OSError) as error:
        free = shutil.disk_usage(root).free
        if free >= LOW_SPACE:
            raise
        raise RuntimeError(f"{error}\n  the disk may be full: {free / 2**20:.1f} MiB are free in {root}") from error


def begin(root: str, rollout_id: int) -> str:
    """An empty directory for the checkpoint of a round. What earlier attempts at this and earlier rounds left is removed.

    The name is new each time, so that a process of a killed run that still writes cannot write into it.
    """
    os.makedirs(root, exist_ok=True)
    for leftover, its_round in dirs.cut_short(root).items():
        if its_round <= rollout_id:
            shutil.rmtree(leftover)
    directory = os.path.join(root, f"{dirs.name_of(rollout_id)}.partial-{uuid.uuid4().hex[:8]}")
    os.mkdir(directory)
    return directory


def commit(partial: str, *, rollout_id: int, keep_last: int | None = None, after: int = 0, **facts) -> str:
    """Declare everything in ``partial`` complete and drop what ``--save-keep-last`` no longer keeps.

    Args:
        after: sequence number of the checkpoint that the run continues from.
        facts: the other fields of ``checkpoint_dirs.Checkpoint``.
    Returns: the final directory.
    """
    root = os.path.dirname(partial)
    sequence = 1 + max([after, *(item.sequence for item in dirs.all_complete(root))])
    manifest = {"format": dirs.FORMAT, "rollout_id": rollout_id, "sequence": sequence, **facts}
    manifest |= {"saved_at": time.time(), "files": _sync_files(partial)}
    _write(os.path.join(partial, dirs.MANIFEST), json.dumps(manifest, indent=1))
    _sync_directory(partial)
    final = os.path.join(root, dirs.name_of(rollout_id))
    _put_in_place(partial, final, facts["run_id"])
    _write(os.path.join(root, dirs.TRACKER), str(rollout_id))
    _sync_directory(root)
    _remove_old(root, facts["run_id"], keep_last)
    return final


def _put_in_place(partial: str, final: str, run_id: str) -> None:
    """Rename; a checkpoint of this run under that name is replaced, anything else keeps existing under another name."""
    root = os.path.dirname(final)
    if os.path.lexists(final):
        earlier = next((item for item in dirs.all_complete(root) if item.directory == final), None)
        aside = f"{final}.replaced"
        if earlier is None or earlier.run_id != run_id:
            aside = f"{final}.earlier-{uuid.uuid4().hex[:8]}"
            logger.warning("%s is not of this run: kept as %s", final, aside)
        elif os.path.exists(aside):
            _delete(aside)
        os.rename(final, aside)
    os.rename(partial, final)
    _sync_directory(root)


def _remove_old(root: str, run_id: str, keep_last: int | None) -> None:
    """Called when the new checkpoint is complete and chosen, so at least that one is always there."""
    own = [item for item in dirs.all_complete(root) if item.run_id == run_id]
    for item in own:
        if item.directory.endswith(".replaced"):
            _delete(item.directory)
    if keep_last is not None:
        current = [item for item in own if not item.directory.endswith(".replaced")]
        for item in current[:-keep_last]:
            _delete(item.directory)


def _delete(directory: str) -> None:
    """Remove a checkpoint such that it is never seen half removed."""
    doomed = f"{directory.removesuffix('.replaced')}.deleting"
    if os.path.exists(doomed):
        shutil.rmtree(doomed)
    os.rename(directory, doomed)
    shutil.rmtree(doomed)


def _sync_files(directory: str) -> dict[str, int]:
    """Bring all files below a directory to the disk. Returns their sizes by relative path."""
    sizes = {}
    for parent, _, names in os.walk(directory):
        for name in sorted(names):
            path = os.path.join(parent, name)
            with open(path, "rb") as file:
                os.fsync(file.fileno())
                sizes[os.path.relpath(path, directory)] = os.fstat(file.fileno()).st_size
        if parent != directory:
            _sync_directory(parent)
    return sizes


def _sync_directory(directory: str) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _write(path: str, text: str) -> None:
    """Replace a file as a whole."""
    partial = f"{path}.tmp"
    with open(partial, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)
