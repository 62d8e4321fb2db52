"""Accounts of users' subclasses of our data sources whose methods hand out or take back groups by themselves.

Such methods know nothing of the ledger. Called through here, what they hand out is in flight until it ends, and what was in flight at a
checkpoint is handed out again before they are asked for more. Methods that only add to ours by `super()` come out the same.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from slime.rollout.group_intake import OPTION, is_group, take_in
from slime.rollout.ledgered_source import LedgeredSource, group_indices
from slime.utils.async_utils import finish
from slime.utils.hook_calls import naming


def keep_accounts(source: LedgeredSource) -> LedgeredSource:
    """The same object, its own `get_samples` and `add_samples` under account; twice is once."""
    for name, accounted in (("get_samples", _hand_out), ("add_samples", _take_back)):
        if is_own(source, name) and name not in vars(source):
            setattr(source, name, partial(accounted, source, getattr(source, name)))
    return source


def is_own(source: Any, name: str) -> bool:
    """Whether a method is the user's class's, not inherited from ours."""
    return not getattr(type(source), name).__module__.startswith("slime.")


def groups_in(buffer: Any) -> list[list]:
    """The groups in a buffer; a user's class may keep something else there, like pairs of a priority and a group."""
    return [group for group in buffer if isinstance(group, list) and group and is_group(group)]


def _hand_out(source, own, num_samples: int) -> list[list]:
    with source._lock:
        groups = source._take_requeued(num_samples)
        wanted, busy = num_samples - len(groups), set(source.ledger.in_flight)
        if wanted > 0:
            with naming(OPTION, source.args.data_source_path):
                found = finish(own(wanted))
            groups += take_in(source, type(source).__name__, found, wanted, busy.__contains__)
        for group in groups:
            source.makes_groups |= not all(map(source.ledger.is_open, group_indices(group)))
            source._note_in_flight(group)
        return groups


def _take_back(source, own, samples: list) -> None:
    with source._lock:
        returned = [
            g for g in group_indices(samples) if g in source.ledger.in_flight and g not in source.ledger.delivered
        ]
        with naming(OPTION, source.args.data_source_path):
            finish(own(samples))
        own_places = [g for g in returned if source.ledger.take_back(g)]  # the others went through ours
        here = set(group_indices(groups_in(getattr(source, "buffer", ())))) if own_places else ()
        for group_index in own_places:
            if group_index not in here:
                source.ledger.waiting[group_index]["kept_by_class"] = True
