"""The interface of data sources, and what all of ours keep: the ledger, and groups to hand out again after a restart.

Invariants: a group handed out is in flight in the ledger until it ends or comes back; the state of a checkpoint holds, for every
group in flight, what is needed to hand it out again as it was. Does not know where prompts come from.
"""

from __future__ import annotations

import logging
import threading
from typing import Any

from slime.rollout.base_types import leaves_of
from slime.rollout.data_ledger import DataLedger
from slime.rollout.round_end import is_aborted, prepare_for_buffer
from slime.rollout.sample_state import decode_group, duplicate_group, encode_group
from slime.utils.types import Sample

logger = logging.getLogger(__name__)

Group = list  # samples of one prompt; a sample may have become a list of several


class DataSource:
    """What the rollout needs of a source of prompts. Subclasses give at least `get_samples`."""

    def get_samples(self, num_samples: int) -> list[list[Sample]]:
        """`num_samples` groups, each of n_samples_per_prompt samples."""
        raise TypeError(f"{type(self).__name__} must define get_samples(num_samples)")

    def add_samples(self, samples: list[list[Sample]]) -> None:
        """Take groups back; a source without a buffer drops them."""

    def mark_finished(self, samples: list, outcome: str = "trained") -> None:
        """Told how each handed-out group ended: trained, filtered, aged_out or failed."""

    def mark_delivered(self, samples: list, rollout_id: int) -> None:
        """Told which groups go into the training of round `rollout_id`."""

    def mark_undelivered(self, samples: list) -> None:
        """Told which delivered groups are not trained after all; they come back by `add_samples`."""

    def stats(self) -> dict[str, Any]:
        """Counts of what became of the prompts."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""

    def save(self, rollout_id: int) -> None:
        """Write the state after training round `rollout_id`."""

    def load(self, rollout_id: int | None = None) -> None:
        """Restore the state written after round `rollout_id`."""

    def __len__(self) -> int:
        """Number of prompts of one epoch; 0 when unknown."""
        return 0


class LedgeredSource(DataSource):
    """A source whose groups are accounted for."""

    def __init__(self, args) -> None:
        self.args = args
        self.ledger = DataLedger()
        self.sample_group_index = self.sample_index = 0  # numbers of the next group and sample
        self._requeued: list[Group] = []  # in flight at the checkpoint this run continues from
        self._lock = threading.RLock()  # a checkpoint may be written while a round asks for samples

    def _take_requeued(self, num_samples: int) -> list[Group]:
        groups = self._requeued[:num_samples]
        del self._requeued[: len(groups)]
        return groups

    def _note_in_flight(self, group: Group, rebuildable: bool = False) -> None:
        """Account for a group that is handed out now.

        Args:
            rebuildable: a fresh group can be made again from its row, so that its samples need not be kept.
        """
        leaves = leaves_of(group)
        if not leaves or leaves[0].group_index is None:
            return
        # One index per sample of the prompt: a finished sample may have become several (fan-out).
        indices = [next((leaf.index for leaf in leaves_of(item)), None) for item in group]
        fresh = all(leaf.status == Sample.Status.PENDING and not leaf.response_length for leaf in leaves)
        kept = None if rebuildable and fresh else duplicate_group(group)
        self.ledger.hand_out(leaves[0].group_index, indices, kept)

    def mark_finished(self, samples: list, outcome: str = "trained") -> None:
        with self._lock:
            for group_index in group_indices(samples):
                self.ledger.settle(group_index, outcome)

    def mark_delivered(self, samples: list, rollout_id: int) -> None:
        with self._lock:
            for group_index in group_indices(samples):
                self.ledger.deliver(group_index, rollout_id)

    def mark_undelivered(self, samples: list) -> None:
        with self._lock:
            for group_index in group_indices(samples):
                self.ledger.delivered.pop(group_index, None)

    def stats(self) -> dict[str, Any]:
        """Number of prompts by outcome, in flight and waiting."""
        with self._lock:
            return {**self.ledger.counts(), "requeued": len(self._requeued)}

    # ---- checkpoints -----------------------------------------------------------------------------------------------

    def _ledger_state(self, dataset: Any = None) -> dict[str, Any]:
        state = self.ledger.state_dict()
        for entry in state["in_flight"].values():
            if entry["samples"] is not None:
                entry["samples"] = encode_group(entry["samples"], dataset)
        requeued = [encode_group(group, dataset) for group in self._requeued]
        return {"ledger": state, "requeued": requeued, "group_size": self.args.n_samples_per_prompt}

    def _load_ledger_state(self, state: dict[str, Any], dataset: Any = None) -> None:
        self.ledger.load_state_dict(state["ledger"])
        in_flight = [self._rebuild(g, entry, dataset) for g, entry in sorted(state["ledger"]["in_flight"].items())]
        requeued = in_flight + [decode_group(group, dataset) for group in state["requeued"]]
        self._requeued = self._fitted(requeued, state)

    def _fitted(self, groups: list[Group], state: dict[str, Any]) -> list[Group]:
        """Groups of a checkpoint as the flags want them now.

        Without --partial-rollout those that were cut short start again from their prompt. With another --n-samples-per-prompt all of
        the former size do; those that were kept to be trained once more are dropped then, as aged out.
        """
        if not self.args.partial_rollout:
            groups = [prepare_for_buffer(g, 0, restart=True) if is_aborted(g) else g for g in groups]
        size = self.args.n_samples_per_prompt
        former = state.get("group_size", size)  # absent: written before there was this entry
        outgrown = [group for group in groups if former != size and len(group) == former]
        if not outgrown:
            return groups
        logger.warning(
            "--n-samples-per-prompt was %d in the checkpoint and is %d: %d unfinished groups start again from their prompt",
            former,
            size,
            len(outgrown),
        )
        fitted = []
        for group in groups:
            if len(group) == former:
                group = self._started_again(leaves_of(group)[0], size)
            fitted += [group] if group else []
        return fitted

    def _started_again(self, sample: Sample, size: int) -> Group | None:
        entry = self.ledger.waiting.get(sample.group_index)  # None: a subclass put it into the buffer itself
        if entry is not None and entry["reuse"]:
            self.ledger.settle(sample.group_index, "aged_out")
            return None
        first = sample.duplicate()
        first.reset_response()
        first.rollout_id = first.session_id = None
        vars(first).pop("trace", None)
        group = first.duplicates(size)
        for twin in group:
            twin.index = self._next_index()
        return group

    def _next_index(self) -> int:
        """The number of the next sample."""
        self.sample_index += 1
        return self.sample_index - 1

    @staticmethod
    def _rebuild(group_index: int, entry: dict[str, Any], dataset: Any) -> Group:
        """A group that was in flight, as it was when it was handed out."""
        if entry["samples"] is not None:
            return decode_group(entry["samples"], dataset)
        group = []
        for index in entry["indices"]:
            sample = dataset.origin_samples[entry["row"]].duplicate()
            sample.group_index, sample.index, sample.data_row = group_index, index, entry["row"]
            group.append(sample)
        return group


def group_indices(samples: list) -> list[int]:
    """Distinct group indices of nested samples, in order."""
    return list(dict.fromkeys(leaf.group_index for leaf in leaves_of(samples) if leaf.group_index is not None))
