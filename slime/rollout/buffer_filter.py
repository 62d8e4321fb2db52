"""Which groups leave the buffer next: `--buffer-filter-path`, a method of the user's data source, or the oldest ones."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from slime.rollout.base_types import leaves_of
from slime.rollout.ledgered_source import group_indices
from slime.utils.hook_calls import call_hook, wrong
from slime.utils.hook_forms import parameter_names
from slime.utils.types import Sample

OPTION = "buffer_filter_path"


def pop_first(args, rollout_id: int | None, buffer: list[list[Sample]], num_samples: int) -> list[list[Sample]]:
    """The default buffer filter: the oldest groups."""
    picked = buffer[:num_samples]
    del buffer[: len(picked)]
    return picked


def own_filter(args) -> Callable:
    """`--buffer-filter-path` or `pop_first`, to be called as (args, rollout_id, buffer, num_samples)."""
    return partial(call_hook, args, OPTION) if args.buffer_filter_path else pop_first


def pick(args, source: Any, buffer: list[list[Sample]], num_samples: int) -> list[list[Sample]]:
    """Have the user's filter take at most `num_samples` groups out of the buffer.

    Raises:
        ValueError: the user's filter returned something else, groups that were not in the buffer or not as they were there, or left
            what it returned in the buffer.
    """
    sizes = {group_index: len(group) for group in buffer for group_index in group_indices(group)}
    function = source.buffer_filter
    is_flag = isinstance(function, partial) and function.func is call_hook
    name = args.buffer_filter_path if is_flag else f"{type(source).__name__}.buffer_filter"
    seed_form = not is_flag and len(parameter_names(function)) == 3  # a method (self, args, buffer, num_samples)
    picked = function(args, *(() if seed_form else (None,)), buffer, num_samples)
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
