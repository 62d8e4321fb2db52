"""Small leaves shared by all layers: singletons, the periodic rule, grouping, boxed references, garbage.

The functions that load hooks are found here too, where users import them from.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable
from typing import Any

from slime.utils.hook_loading import hook_attribute_path, load_function, load_hook, spell_out_hooks

__all__ = [
    "Box",
    "SingletonMeta",
    "group_by",
    "hook_attribute_path",
    "load_function",
    "load_hook",
    "settle_garbage_collection",
    "should_run_periodic_action",
    "spell_out_hooks",
]


class SingletonMeta(type):
    """Metaclass of classes with one instance per process; `clear_instance` forgets it."""

    _instances: dict[type, Any] = {}

    def __call__(cls, *args, **kwargs):
        if cls not in SingletonMeta._instances:
            SingletonMeta._instances[cls] = super().__call__(*args, **kwargs)
        return SingletonMeta._instances[cls]

    def clear_instance(cls) -> None:
        SingletonMeta._instances.pop(cls, None)


class Box:
    """Wraps a value (a Ray object reference) so that it is passed on as it is, not resolved on the way."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    @property
    def inner(self) -> Any:
        return self._inner


def group_by(items: Iterable[Any], key: Callable[[Any], Any] | None = None) -> dict[Any, list[Any]]:
    """Lists of items by key, in first-seen order.

    >>> group_by([1, 2, 3], key=lambda x: x % 2)
    {1: [1, 3], 0: [2]}
    """
    groups: dict[Any, list[Any]] = {}
    for item in items:
        groups.setdefault(item if key is None else key(item), []).append(item)
    return groups


def should_run_periodic_action(
    rollout_id: int, interval: int | None, num_rollout_per_epoch: int | None = None, num_rollout: int | None = None
) -> bool:
    """Whether an action with this interval is due after rollout `rollout_id` (also at epoch ends and at the last one)."""
    if interval is None:
        return False
    if num_rollout is not None and rollout_id == num_rollout - 1:
        return True
    step = rollout_id + 1
    return step % interval == 0 or (num_rollout_per_epoch is not None and step % num_rollout_per_epoch == 0)


def settle_garbage_collection() -> None:
    """Call once a process that makes thousands of small objects a round has started.

    What is there by then lives until the end and is not searched again. Python's threshold of 700 new objects would start a score
    of searches in a round, of objects that nearly all live until its end; cycles are rare, and are found some rounds later.
    """
    gc.freeze()
    gc.set_threshold(20_000, 10, 10)
