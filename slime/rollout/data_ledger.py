"""Bookkeeping of prompts handed out: which are in flight, and how each one ended.

Invariant: a group is in flight from `hand_out` until exactly one of `settle` (trained, filtered, aged_out, failed) or
`take_back` (it is in the buffer again). What is in flight counts as not consumed in a checkpoint. Knows group indices
and data set rows, not the samples.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

OUTCOMES = ("trained", "filtered", "aged_out", "failed")


class DataLedger:
    """`in_flight`: group_index -> `{"row": data set row or None, "indices": sample indices, ...}`."""

    def __init__(self) -> None:
        self.in_flight: dict[int, dict[str, Any]] = {}
        self.delivered: dict[int, int] = {}  # group_index -> round it was handed to training in
        self.outcomes: Counter[str] = Counter()
        self.per_prompt: dict[int, Counter[str]] = {}

    def hand_out(self, group_index: int, entry: dict[str, Any]) -> None:
        self.in_flight[group_index] = entry

    def take_back(self, group_index: int) -> dict[str, Any] | None:
        self.delivered.pop(group_index, None)
        return self.in_flight.pop(group_index, None)

    def settle(self, group_index: int, outcome: str) -> None:
        """Count the end of a group; a group that is not in flight was settled before and is not counted twice."""
        assert outcome in OUTCOMES, outcome
        entry = self.take_back(group_index)
        if entry is None:
            return
        self.outcomes[outcome] += 1
        if entry["row"] is not None:
            self.per_prompt.setdefault(entry["row"], Counter())[outcome] += 1

    def deliver(self, group_index: int, rollout_id: int) -> None:
        if group_index in self.in_flight:
            self.delivered[group_index] = rollout_id

    def settle_delivered(self, last_rollout_id: int) -> None:
        """Settle as trained all groups delivered in rounds up to this one."""
        for group_index in [g for g, r in self.delivered.items() if r <= last_rollout_id]:
            self.settle(group_index, "trained")

    def counts(self) -> dict[str, int]:
        return {**{name: self.outcomes[name] for name in OUTCOMES}, "in_flight": len(self.in_flight)}

    def state_dict(self) -> dict[str, Any]:
        return {
            "in_flight": {g: dict(entry) for g, entry in sorted(self.in_flight.items())},
            "outcomes": dict(self.outcomes),
            "per_prompt": {row: dict(counts) for row, counts in self.per_prompt.items()},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the counts; the in-flight entries are for the data source, which serves those prompts again."""
        self.in_flight, self.delivered = {}, {}
        self.outcomes = Counter(state["outcomes"])
        self.per_prompt = {row: Counter(counts) for row, counts in state["per_prompt"].items()}
