"""The Data Buffer in a checkpoint directory, whatever class it is.

A source with ``state_dict`` is one file of plain values and tensors. A user's class with ``save(rollout_id)`` and
``load(rollout_id)`` of its own, a subclass of ours too, is called with ``args.save`` and ``args.load`` set to the checkpoint directory, so that what it writes is
committed, found and removed together with the rest.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator

from slime.rollout.group_intake import LOOP, OPTION
from slime.rollout.subclass_accounts import is_own
from slime.utils.async_utils import finish
from slime.utils.hook_calls import naming

logger = logging.getLogger(__name__)

FILE = "data_buffer.pt"


def save(args, source, directory: str, rollout_id: int) -> None:
    """Write the state of a data source.

    Raises: ValueError when its ``state_dict`` holds what cannot be read back safely.
    """
    import torch

    path = os.path.join(directory, FILE)
    torch.save(source.state_dict(), path)
    if _is_users(source) or not type(source).__module__.startswith("slime."):
        try:
            torch.load(path, weights_only=True)
        except Exception as error:  # torch has no one type for it
            raise ValueError(
                f"--data-source-path {args.data_source_path}: its state_dict must hold numbers, texts, lists, dicts and tensors "
                f"only; it cannot be read back: {error}"
            ) from error
    if _is_users(source) or is_own(source, "save"):
        with _folders(args, directory), naming(OPTION, args.data_source_path):
            finish(source.save(rollout_id), LOOP)


def load(args, source, directory: str, rollout_id: int) -> None:
    """Restore what `save` wrote; a checkpoint without a Data Buffer starts the prompts from the beginning.

    Raises: ValueError when it was written with another kind of data source.
    """
    import torch

    path = os.path.join(directory, FILE)
    if not os.path.exists(path):
        logger.warning("%s holds no %s: prompts start from the beginning", directory, FILE)
        return
    state = torch.load(path, weights_only=True)
    if ("adapter" in state) != _is_users(source):
        theirs, ours = "a class of the user's", "ours"
        was, is_now = (theirs, ours) if "adapter" in state else (ours, theirs)
        raise ValueError(
            f"{directory} was written with a data source of another kind ({was}) than --data-source-path {args.data_source_path} "
            f"({is_now}); continue with the same, or take the weights alone by --load {directory} --finetune"
        )
    source.load_state_dict(state)
    if _is_users(source) or is_own(source, "load"):
        with _folders(args, directory), naming(OPTION, args.data_source_path):
            finish(source.load(rollout_id), LOOP)


def _is_users(source) -> bool:
    from slime.rollout.data_source_adapter import DataSourceAdapter

    return isinstance(source, DataSourceAdapter)


@contextlib.contextmanager
def _folders(args, directory: str) -> Iterator[None]:
    before = args.save, args.load
    args.save = args.load = directory
    try:
        yield
    finally:
        args.save, args.load = before
