"""Accounts of users' subclasses of our data sources whose methods hand out or take back groups by themselves.

Such methods know nothing of the ledger. Called through here, what they hand out is in flight until it ends, and what was in flight at a
checkpoint is handed out again before they are asked for more. Methods that only add to ours by `super()` come out the same.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from slime.rollout.group_intake import LOOP, OPTION, is_group, take_in
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
        wanted, before = num_samples - len(groups), set(source.ledger.in_flight)
        if wanted > 0:
            busy = before - source.held_back
            with naming(OPTION, source.args.data_source_path):
                found = finish(own(wanted), LOOP)
            groups += take_in(source, type(source).__name__, found, wanted, busy.__contains__)
            given_out = set(group_indices(groups))
            source.held_back -= given_out
            _hold_back(source, source.ledger.in_flight.keys() - before - given_out)
        for group in groups:
            source.makes_groups |= not all(map(source.ledger.is_open, group_indices(group)))
            source._note_in_flight(group)
        return groups


def _hold_back(source, groups: set[int]) -> None:
    """Account for groups in flight that are in a place of the class's own. One that saves itself has to keep them; those of another one
    are handed out again after a restart, like all that is in flight.
    """
    if not is_own(source, "save"):
        source.held_back = (source.held_back | groups) & source.ledger.in_flight.keys()
        return
    for group_index in groups:
        if source.ledger.take_back(group_index):
            source.ledger.waiting[group_index]["kept_by_class"] = True


def _take_back(source, own, samples: list) -> None:
    with source._lock:
        returned = [
            g for g in group_indices(samples) if g in source.ledger.in_flight and g not in source.ledger.delivered
        ]
        with naming(OPTION, source.args.data_source_path):
            finish(own(samples), LOOP)
        kept = source.ledger.in_flight.keys() & returned  # the others went through ours
        here = set(group_indices(groups_in(getattr(source, "buffer", ())))) if kept else set()
        for group_index in kept & here:
            source.ledger.take_back(group_index)
        _hold_back(source, kept - here)
