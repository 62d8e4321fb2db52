"""Which groups leave the buffer next: `--buffer-filter-path`, a method of the user's data source, or the oldest ones."""

from __future__ import annotations

from typing import Any

from slime.rollout.base_types import leaves_of
from slime.utils.hook_calls import call_hook, wrong
from slime.utils.types import Sample

OPTION = "buffer_filter_path"


def pop_first(args, rollout_id: int | None, buffer: list[list[Sample]], num_samples: int) -> list[list[Sample]]:
    """The default buffer filter: the oldest groups."""
    picked = buffer[:num_samples]
    del buffer[: len(picked)]
    return picked


def pick(args, source: Any, buffer: list[list[Sample]], num_samples: int) -> list[list[Sample]]:
    """Take at most `num_samples` groups out of the buffer.

    Raises:
        ValueError: the user's filter returned something else, or left what it returned in the buffer.
    """
    method = getattr(type(source), "buffer_filter", None)  # the seed form: a method of a user's subclass
    if method is not None:
        name, picked = f"{type(source).__name__}.buffer_filter", method(source, args, buffer, num_samples)
    elif args.buffer_filter_path:
        name, picked = args.buffer_filter_path, call_hook(args, OPTION, args, None, buffer, num_samples)
    else:
        return pop_first(args, None, buffer, num_samples)
    if not isinstance(picked, list | tuple):
        raise wrong(OPTION, name, f"returned a {type(picked).__name__}")
    others = [group for group in picked if not isinstance(group, list) or not _are_samples(group)]
    if others:
        raise wrong(OPTION, name, f"returned a {type(others[0]).__name__} that is no group")
    if len(picked) > num_samples:
        raise wrong(OPTION, name, f"returned {len(picked)} groups when asked for {num_samples}")
    left = {id(group) for group in buffer} & {id(group) for group in picked}
    if left:
        raise wrong(
            OPTION, name, f"left {len(left)} of the groups that it returned in the buffer: they would be trained again"
        )
    return list(picked)


def _are_samples(group: list) -> bool:
    leaves = leaves_of(group)
    return bool(leaves) and all(isinstance(leaf, Sample) for leaf in leaves)
