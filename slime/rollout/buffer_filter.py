"""Which groups leave the buffer next: `--buffer-filter-path`, a method of the user's data source, or the oldest ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from slime.rollout.base_types import leaves_of
from slime.rollout.ledgered_source import group_indices
from slime.utils.hook_calls import call_hook, wrong
from slime.utils.types import Sample

OPTION = "buffer_filter_path"


def pop_first(args, rollout_id: int | None, buffer: list[list[Sample]], num_samples: int) -> list[list[Sample]]:
    """The default buffer filter: the oldest groups."""
    picked = buffer[:num_samples]
    del buffer[: len(picked)]
    return picked


def is_users(args, source: Any) -> bool:
    """Whether the user says which groups leave the buffer."""
    return bool(args.buffer_filter_path) or _own_method(source) is not None


def _own_method(source: Any) -> Callable | None:
    """The seed form of the filter: a method of a user's subclass."""
    return getattr(type(source), "buffer_filter", None)


def pick(args, source: Any, buffer: list[list[Sample]], num_samples: int) -> list[list[Sample]]:
    """Have the user's filter take at most `num_samples` groups out of the buffer.

    Raises:
        ValueError: the user's filter returned something else, groups that were not in the buffer or not as they were there, or left
            what it returned in the buffer.
    """
    sizes = {group_index: len(group) for group in buffer for group_index in group_indices(group)}
    method = _own_method(source)
    if method is not None:
        name, picked = f"{type(source).__name__}.buffer_filter", method(source, args, buffer, num_samples)
    else:
        name, picked = args.buffer_filter_path, call_hook(args, OPTION, args, None, buffer, num_samples)
    if not isinstance(picked, list | tuple):
        raise wrong(OPTION, name, f"returned a {type(picked).__name__}")
    others = [group for group in picked if not isinstance(group, list) or not _are_samples(group)]
    if others:
        raise wrong(OPTION, name, f"returned a {type(others[0]).__name__} that is no group")
    if len(picked) > num_samples:
        raise wrong(OPTION, name, f"returned {len(picked)} groups when asked for {num_samples}")
    problem = _problem_with(picked, buffer, sizes)
    if problem:
        raise wrong(OPTION, name, problem)
    return list(picked)


def _problem_with(picked: list, buffer: list, sizes: dict[int, int]) -> str | None:
    """What is wrong with the groups, told by their numbers: a filter may return copies. `sizes`: of what was in the buffer."""
    indices = []
    for group in picked:
        own = group_indices(group)
        if len(own) != 1 or own[0] not in sizes:
            return f"returned a group with the group_index {own or None}, which is none of the buffer's groups"
        if len(group) != sizes[own[0]]:
            return f"returned {len(group)} of the {sizes[own[0]]} samples of group {own[0]}"
        indices.append(own[0])
    if len(set(indices)) < len(indices):
        return "returned a group twice"
    left = set(group_indices(buffer)) & set(indices)
    return (
        f"left {len(left)} of the groups that it returned in the buffer: they would be trained again" if left else None
    )


def _are_samples(group: list) -> bool:
    leaves = leaves_of(group)
    return bool(leaves) and all(isinstance(leaf, Sample) for leaf in leaves)
