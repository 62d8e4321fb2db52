"""Bookkeeping of prompts: where each one is, and how it ended.

Invariants: a group is open from `open` until exactly one of trained, filtered, aged_out, failed ends it (`settle`); while open
it is either waiting (in a buffer) or in flight. The first end counts; a different later one, or a second delivery to training,
is recorded as a conflict, which `slime.rollout.ledger_check` reports. A finished group that is trained again (`reuse`) has an
entry of its own and is counted apart, so that it never counts as a prompt of the epoch.

Epochs, rows and group indices are numbers to it; it does not know samples. Group indices are small and grow.
"""

from __future__ import annotations

from array import array
from collections import Counter
from typing import Any

OUTCOMES = ("trained", "filtered", "aged_out", "failed")
UNUSED = "unused"
"""Row of a stream that never became a prompt, because it is too long."""
CODES = {name: code for code, name in enumerate((*OUTCOMES, UNUSED), start=1)}
NAMES = {code: name for name, code in CODES.items()}
MAX_CONFLICTS = 100
MAX_GAP = 1_000_000
"""Group indices that jump further than this are a user's own numbers: a second end of such a group goes unnoticed."""

Entry = dict[str, Any]


class DataLedger:
    """`in_flight`, `waiting`: group index -> `{"epoch", "row", "reuse"}` (None: no row of a data set), in flight also
    `"indices"` and `"samples"` (what to hand out again after a restart), waiting `"kept_by_class"` where a user's class has it in a
    place of its own. `rows`: epoch -> outcome code of each row.
    """

    def __init__(self) -> None:
        self.in_flight: dict[int, Entry] = {}
        self.waiting: dict[int, Entry] = {}
        self.delivered: dict[int, int] = {}  # group index -> round it was handed to training in
        self.outcomes: Counter[str] = Counter()
        self.reused: Counter[str] = Counter()
        self.rows: dict[int, bytearray] = {}
        self.num_loose, self.loose = 0, Counter()  # prompts that are no row of a data set, and how they ended
        self.conflicts: list[dict[str, Any]] = []
        self._ended = bytearray()  # outcome code by group index
        self._rounds = array("i")  # round that it was trained in, by group index; -1: none

    # ---- open groups -----------------------------------------------------------------------------------------------

    def open(self, group_index: int, *, epoch: int | None = None, row: int | None = None, reuse: bool = False) -> None:
        """A new group, waiting to be handed out."""
        self.waiting[group_index] = {"epoch": epoch, "row": row, "reuse": reuse}
        if row is None and not reuse:
            self.num_loose += 1

    def is_open(self, group_index: int) -> bool:
        return group_index in self.in_flight or group_index in self.waiting

    def hand_out(self, group_index: int, indices: list, samples: Any = None) -> None:
        """The group is being worked on; one that was never opened is taken for a prompt without a row."""
        if not self.is_open(group_index):
            self.open(group_index)
        entry = self.waiting.pop(group_index, None) or self.in_flight[group_index]
        self.in_flight[group_index] = {**_place(entry), "indices": indices, "samples": samples}

    def take_back(self, group_index: int) -> bool:
        """The group is in a buffer again; False when it was not in flight."""
        self.delivered.pop(group_index, None)
        entry = self.in_flight.pop(group_index, None)
        if entry is not None:
            self.waiting[group_index] = _place(entry)
        return entry is not None

    def withdraw(self, group_index: int) -> None:
        """The group went back to whoever keeps it out of our sight; handed out again it counts anew."""
        entry = self.in_flight.pop(group_index, None)
        if entry is not None and entry["row"] is None and not entry["reuse"]:
            self.num_loose -= 1

    # ---- ends ------------------------------------------------------------------------------------------------------

    def settle(self, group_index: int, outcome: str) -> None:
        """Count the end of an open group; groups that this ledger never saw are left out."""
        code = CODES[outcome]
        assert outcome in OUTCOMES, outcome
        rollout_id = self.delivered.pop(group_index, None)
        entry = self.in_flight.pop(group_index, None) or self.waiting.pop(group_index, None)
        earlier = self.outcome_of(group_index)
        if entry is None:
            if earlier not in (None, outcome):
                self._conflict(group_index, f"ended as {earlier}, then as {outcome}")
            return
        if 0 <= group_index < len(self._ended) + MAX_GAP:
            _set(self._ended, group_index, code)
            if outcome == "trained" and rollout_id is not None:
                self._rounds.extend([-1] * (group_index + 1 - len(self._rounds)))
                self._rounds[group_index] = rollout_id
        if entry["reuse"]:
            self.reused[outcome] += 1
            return
        self.outcomes[outcome] += 1
        if entry["row"] is None:
            self.loose[outcome] += 1
        else:
            self._settle_row(group_index, entry["epoch"], entry["row"], code)

    def _settle_row(self, group_index: int, epoch: int, row: int, code: int) -> None:
        ended = self.rows.setdefault(epoch, bytearray())
        if row < len(ended) and ended[row]:
            self._conflict(group_index, f"epoch {epoch} row {row} ended before as {NAMES[ended[row]]}")
        _set(ended, row, code)

    def leave_out(self, epoch: int, row: int) -> None:
        """A row that was read and is no prompt."""
        _set(self.rows.setdefault(epoch, bytearray()), row, CODES[UNUSED])

    def deliver(self, group_index: int, rollout_id: int) -> None:
        """The group goes into the training of a round."""
        if group_index in self.in_flight:
            self.delivered[group_index] = rollout_id
        elif self.outcome_of(group_index) is not None:
            self._conflict(group_index, f"delivered to round {rollout_id} after it ended")

    def settle_delivered(self, last_rollout_id: int) -> None:
        """Settle as trained all groups delivered in rounds up to this one."""
        for group_index in [g for g, r in self.delivered.items() if r <= last_rollout_id]:
            self.settle(group_index, "trained")

    def outcome_of(self, group_index: int) -> str | None:
        code = self._ended[group_index] if 0 <= group_index < len(self._ended) else 0
        return NAMES.get(code)

    def round_of(self, group_index: int) -> int | None:
        """The round that a group is or was trained in, where known."""
        if group_index in self.delivered or not 0 <= group_index < len(self._rounds):
            return self.delivered.get(group_index)
        return None if self._rounds[group_index] < 0 else self._rounds[group_index]

    def _conflict(self, group_index: int, text: str) -> None:
        if len(self.conflicts) < MAX_CONFLICTS:
            self.conflicts.append({"group_index": group_index, "what": text})

    # ---- reading and keeping ---------------------------------------------------------------------------------------

    def counts(self) -> dict[str, int]:
        """Prompts by outcome and in flight; `reused`: trainings of groups that had been trained before."""
        ends = {name: self.outcomes[name] for name in OUTCOMES}
        return {**ends, "in_flight": len(self.in_flight), "reused": self.reused["trained"]}

    def per_row(self) -> dict[int, dict[str, int]]:
        """Data set row -> how often it ended in which way, over all epochs."""
        found: dict[int, Counter[str]] = {}
        for codes in self.rows.values():
            for row, code in enumerate(codes):
                if code:
                    found.setdefault(row, Counter())[NAMES[code]] += 1
        return {row: dict(counts) for row, counts in sorted(found.items())}

    def state_dict(self) -> dict[str, Any]:
        """Plain values and tensors; `samples` of entries are left to the caller."""
        return {
            "in_flight": {g: dict(entry) for g, entry in sorted(self.in_flight.items())},
            "waiting": {g: dict(entry) for g, entry in sorted(self.waiting.items())},
            "rows": {epoch: _tensor(codes) for epoch, codes in self.rows.items()},
            "ended": _tensor(self._ended),
            "rounds": _tensor(self._rounds),
            "outcomes": dict(self.outcomes),
            "reused": dict(self.reused),
            "num_loose": self.num_loose,
            "loose": dict(self.loose),
            "conflicts": [dict(conflict) for conflict in self.conflicts],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore; what was in flight is waiting now, because the data source serves those prompts again."""
        self.in_flight, self.delivered = {}, {}
        in_flight = {g: _place(entry) for g, entry in state["in_flight"].items()}
        self.waiting = {g: dict(entry) for g, entry in sorted({**state["waiting"], **in_flight}.items())}
        self.rows = {epoch: bytearray(codes.numpy().tobytes()) for epoch, codes in state["rows"].items()}
        self._ended = bytearray(state["ended"].numpy().tobytes())
        self._rounds = array("i", state["rounds"].tolist() if "rounds" in state else [])
        self.outcomes, self.reused = Counter(state["outcomes"]), Counter(state["reused"])
        self.num_loose, self.loose = state["num_loose"], Counter(state["loose"])
        self.conflicts = [dict(conflict) for conflict in state["conflicts"]]


def _place(entry: Entry) -> Entry:
    return {name: entry[name] for name in ("epoch", "row", "reuse")}


def _set(codes: bytearray, position: int, code: int) -> None:
    missing = position + 1 - len(codes)
    if missing > 0:
        codes.extend(bytes(missing))
    codes[position] = code


def _tensor(codes: bytearray | array):
    import numpy as np
    import torch

    return torch.from_numpy(np.frombuffer(bytes(codes), np.int32 if isinstance(codes, array) else np.uint8).copy())
