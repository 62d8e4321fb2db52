"""Which directories of a checkpoint folder are complete, and which one a run goes on from. Reads, never writes.

``<folder>/iter_0000010/`` is complete when it holds ``manifest.json``; ``latest_checkpointed_iteration.txt``, written after it,
names the one that counts, whatever its number is. Directories under other names (``.partial-*``, ``.deleting``) were cut short.
The writer is ``slime/ray/checkpoint.py``.
"""

from __future__ import annotations

import json
import logging
import os
import re
from dataclasses import dataclass
from typing import Any

from slime.config.spec import UserError

logger = logging.getLogger(__name__)

MANIFEST = "manifest.json"
TRACKER = "latest_checkpointed_iteration.txt"
RELEASE = "release"  # Megatron's name for weights that belong to no round, such as converted ones
FORMAT = 2
#: ``.replaced`` is the earlier checkpoint of a round that was being saved again when the run ended.
_COMPLETE = re.compile(r"iter_(\d{7})(\.replaced)?")
_CUT_SHORT = re.compile(r"iter_(\d{7})\.(partial-\w+|deleting)")
#: Facts of config.json that have to be equal for weights to fit.
_SHAPE = (
    "model_type hidden_size num_hidden_layers num_attention_heads num_key_value_heads head_dim intermediate_size "
    "vocab_size tie_word_embeddings num_experts moe_intermediate_size"
).split()


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint.

    rollout_id: the last round trained into it. weight_version: of the engines when it was saved. run_id: the run that
    wrote it, kept when that run is continued. sequence: counts the saves of a folder. started_from: what ``--load`` named
    when the run began. prompts: of all rounds trained into it, by the batch sizes of their time; None where it was not recorded.
    """

    directory: str
    rollout_id: int
    weight_version: int
    run_id: str
    sequence: int
    started_from: str | None
    precision: str
    model: dict[str, Any]
    prompts: int | None = None


def name_of(rollout_id: int) -> str:
    return f"iter_{rollout_id:07d}"


def model_shape(arch: dict[str, Any]) -> dict[str, Any]:
    """The facts of a config.json that a checkpoint records."""
    return {name: arch[name] for name in _SHAPE if arch.get(name) is not None}


def all_complete(folder: str) -> list[Checkpoint]:
    """Every complete checkpoint of a folder in the order of saving."""
    found = [_read(os.path.join(folder, name)) for name in _names(folder) if _COMPLETE.fullmatch(name)]
    return sorted((item for item in found if item is not None), key=lambda item: item.sequence)


def cut_short(folder: str) -> dict[str, int]:
    """Directories that were never finished -> their round."""
    found = {name: _CUT_SHORT.fullmatch(name) for name in _names(folder)}
    return {os.path.join(folder, name): int(match[1]) for name, match in found.items() if match}


def latest(folder: str | None) -> Checkpoint | None:
    """The checkpoint to go on from: the one that the tracker file names, else the last one saved; None without any.

    ``folder`` may also be one checkpoint directory itself.

    Raises: UserError when files that the manifest lists are missing or too short.
    """
    if not folder or not os.path.isdir(folder):
        return None
    if os.path.exists(os.path.join(folder, MANIFEST)):
        return _checked(folder)
    tracked = tracked_round(folder)
    named = at_round(folder, tracked) if tracked is not None else None
    if named is not None:
        return named
    complete = all_complete(folder)
    if not complete:
        return None
    logger.warning("%s: %s names %s, which is not there: taking the last one saved", folder, TRACKER, tracked)
    return _checked(complete[-1].directory)


def done_before(args) -> tuple[int, int]:
    """(number of the run's first round, prompts of all rounds before it)."""
    found, first = latest(args.resume_from), args.start_rollout_id
    if first is None:
        first = 0 if found is None else found.rollout_id + 1
    if found is None or found.prompts is None or first != found.rollout_id + 1:
        return first, first * args.rollout_batch_size
    return first, found.prompts


def at_round(folder: str, rollout_id: int) -> Checkpoint | None:
    """The complete checkpoint of one round; None when there is none."""
    for suffix in ("", ".replaced"):
        directory = os.path.join(folder, name_of(rollout_id) + suffix)
        if _manifest(directory) is not None:
            return _checked(directory)
    return None


def tracked_round(folder: str) -> int | None:
    """What the tracker file says; None without one that holds a number."""
    try:
        with open(os.path.join(folder, TRACKER), encoding="utf-8") as file:
            return int(file.read().strip())
    except (OSError, ValueError):
        return None


def tracks_release(folder: str) -> bool:
    """Whether the tracker file names weights of no round."""
    try:
        with open(os.path.join(folder, TRACKER), encoding="utf-8") as file:
            return file.read().strip() == RELEASE
    except OSError:
        return False


def _names(folder: str) -> list[str]:
    try:
        return sorted(os.listdir(folder))
    except OSError:
        return []


def _manifest(directory: str) -> dict[str, Any] | None:
    try:
        with open(os.path.join(directory, MANIFEST), encoding="utf-8") as file:
            return json.load(file)
    except (OSError, json.JSONDecodeError):
        return None


def _read(directory: str) -> Checkpoint | None:
    """A complete checkpoint that this version can read, else None."""
    manifest = _manifest(directory)
    if manifest is None or manifest.get("format") != FORMAT:
        return None
    fields = ("rollout_id", "weight_version", "run_id", "sequence", "started_from", "precision", "model")
    return Checkpoint(directory, *(manifest[name] for name in fields), prompts=manifest.get("prompts"))


def _checked(directory: str) -> Checkpoint:
    found, manifest = _read(directory), _manifest(directory) or {}
    if found is None:
        raise UserError(
            f"checkpoint {directory}: {MANIFEST} has format {manifest.get('format')!r}, this version reads {FORMAT}"
        )
    wrong = []
    for name, size in manifest["files"].items():
        path = os.path.join(directory, name)
        if not os.path.exists(path):
            wrong.append(f"{name} is missing")
        elif os.path.getsize(path) != size:
            wrong.append(f"{name} has {os.path.getsize(path)} bytes instead of {size}")
    if wrong:
        raise UserError(
            f"checkpoint {directory} was damaged after it was written: {'; '.join(wrong[:5])}. Remove the directory to go on "
            "from the one before it"
        )
    return found


def check_model(found: Checkpoint, arch: dict[str, Any], precision: str, model_folder: str) -> None:
    """UserError when a checkpoint holds another model, or numbers of another format, than the run would train."""
    here = model_shape(arch)
    differences = [
        f"{name} {found.model.get(name)} there, {here.get(name)} here"
        for name in _SHAPE
        if found.model.get(name) != here.get(name)
    ]
    if differences:
        raise UserError(
            f"checkpoint {found.directory} holds another model than --hf-checkpoint {model_folder}: {'; '.join(differences)}"
        )
    if found.precision != precision:
        raise UserError(
            f"checkpoint {found.directory} was trained with --precision {found.precision}, this run has {precision}: give the "
            "same one, or --finetune to start anew from its weights"
        )
