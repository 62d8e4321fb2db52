"""Does the ledger of a checkpoint add up? For `slime ledger DIR`.

Every prompt that was handed out must have ended exactly once, or be open exactly once; every open group must be in the buffer,
requeued or in flight, and nothing else may be there. Works on the state of `data_buffer.pt` alone, so that it checks what a
continued run would start from. Knows no files.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from slime.rollout.data_ledger import NAMES, OUTCOMES, UNUSED

PLACES = ("in_flight", "waiting")


@dataclass
class LedgerReport:
    """One line per epoch: `{"epoch", "prompts", "handed_out", outcomes..., "in_flight", "waiting"}`, and what is wrong."""

    lines: list[dict[str, Any]] = field(default_factory=list)
    reused: int = 0
    problems: list[str] = field(default_factory=list)


def check(state: dict[str, Any]) -> LedgerReport:
    """Read the state of a Data Buffer (ours, or a user's class with our accounts around it)."""
    report = LedgerReport(reused=state["ledger"]["reused"].get("trained", 0))
    if "data_set" in state:
        _check_epochs(state, report)
    _check_loose(state, report)
    _check_places(state, report)
    for conflict in state["ledger"]["conflicts"]:
        report.problems.append(f"group {conflict['group_index']} {conflict['what']}")
    total = Counter({name: sum(line[name] for line in report.lines) for name in OUTCOMES})
    if +total != +Counter(state["ledger"]["outcomes"]):
        report.problems.append(
            f"outcomes are counted as {state['ledger']['outcomes']}, the prompts give {dict(+total)}"
        )
    return report


# ---- prompts of a data set -----------------------------------------------------------------------------------------


def _check_epochs(state: dict[str, Any], report: LedgerReport) -> None:
    ledger = state["ledger"]
    open_rows = {place: _rows_in(ledger[place]) for place in PLACES}
    epochs = {epoch for places in open_rows.values() for epoch in places} | set(ledger["rows"])
    if (state["sample_offset"] or state["epoch_id"]) and not state["data_set"].get("makes_groups"):
        epochs |= set(range(state["epoch_id"] + 1))
    for epoch in sorted(epochs):
        codes = ledger["rows"].get(epoch)
        ended = {} if codes is None else {row: code for row, code in enumerate(codes.tolist()) if code}
        places = {place: open_rows[place].get(epoch, Counter()) for place in PLACES}
        served = _served(state, epoch, {*ended, *places["in_flight"], *places["waiting"]})
        found = Counter(dict.fromkeys(ended, 1)) + places["in_flight"] + places["waiting"]
        for row in sorted({*found, *served}):
            _check_row(epoch, row, row in served, ended.get(row), places, report)
        counts = Counter(NAMES[code] for code in ended.values())
        prompts = state["data_set"]["rows"] or None
        handed_out = len(served) - counts[UNUSED]
        line = {"epoch": epoch, "prompts": prompts, "handed_out": handed_out, **{o: counts[o] for o in OUTCOMES}}
        report.lines.append(line | {place: places[place].total() for place in PLACES})


def _rows_in(entries: dict[int, dict]) -> dict[int, Counter]:
    found: dict[int, Counter] = {}
    for entry in entries.values():
        if entry["row"] is not None:
            found.setdefault(entry["epoch"], Counter())[entry["row"]] += 1
    return found


def _served(state: dict[str, Any], epoch: int, known: set[int]) -> set[int]:
    """Rows that were handed out in an epoch, by the position in the data; it says nothing when a subclass makes groups itself."""
    data, current = state["data_set"], state["epoch_id"]
    if data.get("makes_groups"):
        return known
    if epoch > current:
        return set()
    if epoch == current:
        order = list(range(data["rows"] or state["sample_offset"]))
        if data["shuffle"]:
            random.Random(data["seed"] + epoch).shuffle(order)
        return set(order[: state["sample_offset"]])
    whole = data["rows"] or state["stream_rows"]
    return set(range(whole)) if whole else known


def _check_row(epoch: int, row: int, served: bool, code: int | None, places: dict, report: LedgerReport) -> None:
    states = ([NAMES[code]] if code else []) + [p.replace("_", " ") for p in PLACES for _ in range(places[p][row])]
    if served and not states:
        report.problems.append(f"epoch {epoch} row {row}: handed out, then lost: neither ended nor open")
    elif not served:
        report.problems.append(
            f"epoch {epoch} row {row}: {' and '.join(states)}, but the position says it is still to come"
        )
    elif len(states) > 1:
        report.problems.append(f"epoch {epoch} row {row}: {' and '.join(states)} at once")


# ---- prompts without a row, groups in their places -----------------------------------------------------------------


def _check_loose(state: dict[str, Any], report: LedgerReport) -> None:
    ledger = state["ledger"]
    counts = {place: sum(e["row"] is None and not e["reuse"] for e in ledger[place].values()) for place in PLACES}
    ended = {name: ledger["loose"].get(name, 0) for name in OUTCOMES}
    total = sum(counts.values()) + sum(ended.values())
    if total != ledger["num_loose"]:
        report.problems.append(
            f"{ledger['num_loose']} prompts without a row were handed out, {total} ended or are open"
        )
    if ledger["num_loose"]:
        line = {"epoch": None, "prompts": None, "handed_out": ledger["num_loose"], **ended, **counts}
        report.lines.append(line)


def _check_places(state: dict[str, Any], report: LedgerReport) -> None:
    """Waiting groups are in the buffer or requeued, and only those are. A user's class keeps its buffer to itself."""
    if "adapter" in state:
        return
    there = Counter(_group_index(group) for group in [*state.get("buffer", []), *state["requeued"]])
    waiting = state["ledger"]["waiting"]
    for group_index, count in sorted(there.items()):
        if count > 1:
            report.problems.append(f"group {group_index} is in the buffer {count} times")
        if group_index not in waiting:
            report.problems.append(f"group {group_index} is in the buffer, but the ledger does not have it waiting")
    for group_index, entry in sorted(waiting.items()):
        if group_index not in there and not entry.get("kept_by_class"):
            where = "" if entry["row"] is None else f" (epoch {entry['epoch']} row {entry['row']})"
            report.problems.append(f"group {group_index}{where} should wait in the buffer and is not there")


def _group_index(group: Any) -> int:
    while isinstance(group, list):
        group = group[0]
    return group["group_index"]
