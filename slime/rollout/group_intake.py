"""What a user's `get_samples` returns, as groups that the rollout can work with: whole, and with numbers of their own.

Accepted are groups, a flat list of samples, rows or texts. Knows no files and no engine; accounts are the caller's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from slime.rollout.base_types import leaves_of
from slime.rollout.ledgered_source import LedgeredSource
from slime.rollout.sample_state import duplicate_group
from slime.utils.data import RowFormat, row_to_sample
from slime.utils.hook_calls import wrong
from slime.utils.media_values import keeps_samples, settle_media
from slime.utils.types import Sample

OPTION = "data_source_path"
LOOP = "slime-data-source"
"""Where async methods of users' classes run: they are called under a lock, for which tasks of the other loops wait."""


def take_in(
    source: LedgeredSource, name: str, found: Any, num_samples: int, is_busy: Callable[[int], bool] | None = None
) -> list[list]:
    """The groups in `found`; one that has no numbers, or those of another group, gets numbers of its own.

    Args:
        name: of the user's class. is_busy: whether a group index belongs to a group that is being worked on; None: to any that is open.

    Raises:
        ValueError: it is no list of samples, or holds one of them twice.
    """
    args = source.args
    if not hasattr(found, "__iter__") or isinstance(found, str | dict):
        raise wrong(OPTION, args.data_source_path, f"get_samples returned a {type(found).__name__}")
    found = list(found)
    groups = [item if isinstance(item, list) and is_group(item) else None for item in found]
    if any(group is None for group in groups):
        groups = _grouped(args, [_sample(args, name, item) for item in found], num_samples)
    leaves = leaves_of(groups)
    if not all(groups) or len({id(leaf) for leaf in leaves}) < len(leaves):
        what = "a sample twice" if all(groups) else "an empty group"
        raise wrong(OPTION, args.data_source_path, f"get_samples returned {what}")
    options = args.apply_chat_template_kwargs or {}
    for leaf in leaves:
        settle_media(leaf, keeps_samples(args), f"--data-source-path {args.data_source_path}")
        leaf.apply_chat_template_kwargs = leaf.apply_chat_template_kwargs or dict(options)
    taken: set[int] = set()
    return [_numbered(source, group, taken, is_busy or source.ledger.is_open) for group in groups]


def is_group(item: list) -> bool:
    """Whether a list holds samples only, and no text or row."""
    return all(isinstance(leaf, Sample) for leaf in leaves_of(item))


def _sample(args, name: str, item: Any) -> Sample:
    if isinstance(item, Sample):
        return item
    if isinstance(item, dict):
        return row_to_sample(item, f"{name}.get_samples", RowFormat.from_args(args).detect_keys(item))
    if isinstance(item, (str, list)):
        return Sample(prompt=item)
    raise wrong(OPTION, args.data_source_path, f"get_samples returned a list with a {type(item).__name__}")


def _grouped(args, samples: list[Sample], num_samples: int) -> list[list[Sample]]:
    """Flat samples as groups: `num_samples` whole groups in a row, else one prompt each, copied: the class may keep its own."""
    size = args.n_samples_per_prompt
    if size > 1 and len(samples) == num_samples * size:
        return [samples[i : i + size] for i in range(0, len(samples), size)]
    return [sample.duplicates(size) for sample in samples]


def _numbered(source: LedgeredSource, group: list, taken: set[int], is_busy: Callable[[int], bool]) -> list:
    """The group with numbers of its own; a copy where the class gave it those of a group that is still being worked on.

    Args:
        taken: group indices of this call, added to.
    """
    given = {leaf.group_index for leaf in leaves_of(group)}
    is_taken = len(given) > 1 or any(index in taken or is_busy(index) for index in given)
    if is_taken:
        group = duplicate_group(group)
    number = _next_group_index(source, taken) if is_taken or None in given else given.pop()
    indices = [next((leaf.index for leaf in leaves_of(item)), None) for item in group]
    if is_taken or None in indices or len(set(indices)) < len(indices):  # equal ones would sample the same response
        for item in group:
            index = source._next_index()
            for part in leaves_of(item):
                part.index = index
    for leaf in leaves_of(group):
        leaf.group_index = number
    taken.add(number)
    return group


def _next_group_index(source: LedgeredSource, taken: set[int]) -> int:
    """A number that no group has had."""
    ledger = source.ledger
    while (number := source.sample_group_index) in taken or ledger.is_open(number) or ledger.outcome_of(number):
        source.sample_group_index += 1
    source.sample_group_index += 1
    return number
