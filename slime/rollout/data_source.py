"""The Data Buffer: prompts in, groups of samples out, unfinished groups back in.

Invariants: every row of the data set is handed out once per epoch, in the order of
`random.Random(seed + epoch).shuffle` of the file order; group and sample indices only grow; a checkpoint holds the
buffer and counts groups in flight as not consumed, so that after a resume each prompt is trained once.
Does not know how samples are generated or scored.
"""

from __future__ import annotations

import copy
import logging
import os
import random
import threading
from typing import Any

from slime.rollout.base_types import leaves_of
from slime.rollout.data_ledger import DataLedger
from slime.rollout.sample_state import decode_group, encode_group
from slime.utils.data import PromptSet, RowFormat
from slime.utils.misc import load_hook
from slime.utils.streaming_data import StreamingPrompts
from slime.utils.types import Sample

logger = logging.getLogger(__name__)

STATE_FIELDS = ("sample_offset", "epoch_id", "sample_group_index", "sample_index", "metadata")


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


class RolloutDataSource(DataSource):
    """Prompts of `--prompt-data`, epoch after epoch, without a buffer for unfinished work."""

    def __init__(self, args) -> None:
        self.args = args
        self.sample_offset = 0
        self.epoch_id = 0
        self.sample_group_index = 0
        self.sample_index = 0
        self.metadata: dict[str, Any] = {}
        self.ledger = DataLedger()
        self._requeued: list[list[Sample]] = []  # in flight at the checkpoint this run continues from
        self._lock = threading.RLock()
        self.dataset = _load_dataset(args)
        self._order = self._epoch_order()

    # ---- handing out -----------------------------------------------------------------------------------------------

    def get_samples(self, num_samples: int) -> list[list[Sample]]:
        with self._lock:
            groups = self._requeued[:num_samples]
            del self._requeued[: len(groups)]
            groups += [self._next_group() for _ in range(num_samples - len(groups))]
            for group in groups:
                self._note_in_flight(group)
            return groups

    def _next_group(self) -> list[Sample]:
        if isinstance(self.dataset, StreamingPrompts):
            return self._number_group(self._next_streamed(self.dataset), row=None)
        if self.dataset is None:
            return self._number_group(Sample(), row=None)
        if self.sample_offset >= len(self.dataset):
            self.epoch_id += 1
            self.sample_offset = 0
            self._order = self._epoch_order()
        row = self._order[self.sample_offset]
        self.sample_offset += 1
        return self._number_group(self.dataset[row], row=row)

    def _next_streamed(self, stream: StreamingPrompts) -> Sample:
        sample = stream.next()
        if sample is None:
            self.epoch_id += 1
            stream.rewind()
            sample = stream.next()
        self.sample_offset = stream.position
        return sample

    def _number_group(self, prompt: Sample, row: int | None) -> list[Sample]:
        group = []
        for _ in range(self.args.n_samples_per_prompt):
            sample = prompt.duplicate()
            sample.group_index, sample.index = self.sample_group_index, self.sample_index
            sample.data_row = row
            self.sample_index += 1
            group.append(sample)
        self.sample_group_index += 1
        return group

    def _note_in_flight(self, group: list) -> None:
        leaves = leaves_of(group)
        if not leaves or leaves[0].group_index is None:
            return
        row = vars(leaves[0]).get("data_row")
        # One index per sample of the prompt: a finished sample may have become several (fan-out).
        indices = [next((leaf.index for leaf in leaves_of(item)), None) for item in group]
        entry: dict[str, Any] = {"row": row, "indices": indices}
        if row is None:
            entry["samples"] = encode_group(copy.deepcopy(group))
        self.ledger.hand_out(leaves[0].group_index, entry)

    def _epoch_order(self) -> list[int]:
        order = list(range(len(self)))
        if self.args.rollout_shuffle:
            random.Random(self.args.rollout_seed + self.epoch_id).shuffle(order)
        return order

    # ---- outcomes --------------------------------------------------------------------------------------------------

    def add_samples(self, samples: list[list[Sample]]) -> None:
        """Without a buffer, groups that come back are dropped for this epoch and counted as aged out."""
        self.mark_finished(samples, "aged_out")

    def mark_finished(self, samples: list, outcome: str = "trained") -> None:
        with self._lock:
            for group_index in _group_indices(samples):
                self.ledger.settle(group_index, outcome)

    def mark_delivered(self, samples: list, rollout_id: int) -> None:
        with self._lock:
            for group_index in _group_indices(samples):
                self.ledger.deliver(group_index, rollout_id)

    def stats(self) -> dict[str, Any]:
        """Number of prompts by outcome, in flight and waiting; `per_prompt`: data set row -> outcome counts."""
        with self._lock:
            per_prompt = {row: dict(counts) for row, counts in self.ledger.per_prompt.items()}
            return {
                "epoch": self.epoch_id,
                **self.ledger.counts(),
                "requeued": len(self._requeued),
                "per_prompt": per_prompt,
            }

    # ---- checkpoints -----------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Everything needed to go on: plain values and tensors only."""
        with self._lock:
            state = {name: copy.deepcopy(getattr(self, name)) for name in STATE_FIELDS}
            return {
                **state,
                "ledger": self.ledger.state_dict(),
                "requeued": [encode_group(group) for group in self._requeued],
                "data_set": {"rows": len(self), "seed": self.args.rollout_seed, "shuffle": self.args.rollout_shuffle},
            }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        with self._lock:
            self._check_same_data(state.get("data_set"))
            for name in STATE_FIELDS:
                setattr(self, name, copy.deepcopy(state[name]))
            self._order = self._epoch_order()
            if isinstance(self.dataset, StreamingPrompts):
                self.dataset.rewind(self.sample_offset)
            if "ledger" in state:
                self.ledger.load_state_dict(state["ledger"])
                in_flight = [self._rebuild(g, entry) for g, entry in sorted(state["ledger"]["in_flight"].items())]
                self._requeued = in_flight + [decode_group(group, self.dataset) for group in state["requeued"]]

    def _rebuild(self, group_index: int, entry: dict[str, Any]) -> list:
        """A group that was in flight, as it was before generation."""
        if entry["row"] is None:
            return decode_group(entry["samples"], self.dataset)
        group = []
        for index in entry["indices"]:
            sample = copy.deepcopy(self.dataset[entry["row"]])
            sample.group_index, sample.index, sample.data_row = group_index, index, entry["row"]
            group.append(sample)
        return group

    def _check_same_data(self, saved: dict[str, Any] | None) -> None:
        if saved is not None and saved["rows"] != len(self):
            raise ValueError(
                f"the checkpoint was written with {saved['rows']} prompts, --prompt-data {self.args.prompt_data} now gives "
                f"{len(self)}; continue with the same data, or start over with --no-resume"
            )
        if saved is not None and (saved["seed"], saved["shuffle"]) != (
            self.args.rollout_seed,
            self.args.rollout_shuffle,
        ):
            logger.warning("--rollout-seed or --rollout-shuffle differ from the checkpoint: this epoch's order changes")

    def save(self, rollout_id: int) -> None:
        """Write `{args.save}/rollout/global_dataset_state_dict_{rollout_id}.pt`; rounds up to this one are trained."""
        if not self.args.rollout_global_dataset:
            return
        import torch

        with self._lock:
            self.ledger.settle_delivered(rollout_id)
            path = _state_path(self.args.save, rollout_id)
            os.makedirs(os.path.dirname(path), exist_ok=True)
            torch.save(self.state_dict(), path + ".tmp")
            os.replace(path + ".tmp", path)

    def load(self, rollout_id: int | None = None) -> None:
        """Restore what `save` wrote under `args.load`; an absent file means a fresh start."""
        if not self.args.rollout_global_dataset or self.args.load is None or rollout_id is None:
            return
        import torch

        path = _state_path(self.args.load, rollout_id)
        if not os.path.exists(path):
            logger.info("no data state at %s: prompts start from the beginning", path)
            return
        self.load_state_dict(torch.load(path, weights_only=True))

    def __len__(self) -> int:
        return len(self.dataset) if isinstance(self.dataset, PromptSet) else 0


class RolloutDataSourceWithBuffer(RolloutDataSource):
    """The default: prompts plus a FIFO buffer of groups that came back (partial, surplus, user-pushed)."""

    def __init__(self, args) -> None:
        super().__init__(args)
        self.buffer: list[list[Sample]] = []
        self._buffer_filter = pop_first
        if args.buffer_filter_path:
            self._buffer_filter = load_hook(args.buffer_filter_path, "buffer_filter_path")

    def get_samples(self, num_samples: int) -> list[list[Sample]]:
        with self._lock:
            groups = self._take_from_buffer(num_samples) if self.buffer and num_samples > 0 else []
            for group in groups:
                self._note_in_flight(group)
            return groups + super().get_samples(num_samples - len(groups))

    def _take_from_buffer(self, num_samples: int) -> list[list[Sample]]:
        method = getattr(type(self), "buffer_filter", None)  # the seed form: a method of a user's subclass
        if method is not None:
            return list(method(self, self.args, self.buffer, num_samples))
        return list(self._buffer_filter(self.args, None, self.buffer, num_samples))

    def add_samples(self, samples: list[list[Sample]]) -> None:
        if not samples:
            return
        assert isinstance(samples, list), f"add_samples takes a list of groups, got {type(samples).__name__}"
        for group in samples:
            assert isinstance(group, list), f"add_samples takes a list of groups, got a {type(group).__name__} in it"
            assert len(group) == self.args.n_samples_per_prompt, (
                f"a group of {len(group)} samples, --n-samples-per-prompt is {self.args.n_samples_per_prompt}"
            )
        with self._lock:
            for group in samples:
                self._adopt(group)
                self.buffer.append(group)

    def _adopt(self, group: list) -> None:
        """Number a group that the user pushed; end the flight of one that came from here."""
        leaves = leaves_of(group)
        if leaves[0].group_index is None:
            for leaf in leaves:
                leaf.group_index, leaf.index = self.sample_group_index, self.sample_index
                self.sample_index += 1
            self.sample_group_index += 1
        self.ledger.take_back(leaves[0].group_index)

    def get_buffer_length(self) -> int:
        return len(self.buffer)

    def update_metadata(self, metadata: dict[str, Any]) -> None:
        self.metadata.update(metadata)

    def get_metadata(self) -> dict[str, Any]:
        return self.metadata

    def stats(self) -> dict[str, Any]:
        return {**super().stats(), "buffered": len(self.buffer)}

    def state_dict(self) -> dict[str, Any]:
        with self._lock:
            return {**super().state_dict(), "buffer": [encode_group(group) for group in self.buffer]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        with self._lock:
            super().load_state_dict(state)
            self.buffer = [decode_group(group, self.dataset) for group in state.get("buffer", [])]


def pop_first(args, rollout_id: int | None, buffer: list[list[Sample]], num_samples: int) -> list[list[Sample]]:
    """The default buffer filter: the oldest groups."""
    picked = buffer[:num_samples]
    del buffer[: len(picked)]
    return picked


def create_data_source(args) -> DataSource:
    """The data source of `--data-source-path`, in whatever documented form its class has."""
    from slime.rollout.data_source_adapter import adapt_class

    return adapt_class(args, load_hook(args.data_source_path, "data_source_path"))


def _group_indices(samples: list) -> list[int]:
    """Distinct group indices of nested samples, in order."""
    return list(dict.fromkeys(leaf.group_index for leaf in leaves_of(samples) if leaf.group_index is not None))


def _state_path(folder: str, rollout_id: int) -> str:
    return os.path.join(folder, "rollout", f"global_dataset_state_dict_{rollout_id}.pt")


def _load_dataset(args) -> PromptSet | StreamingPrompts | None:
    if not args.rollout_global_dataset or not args.prompt_data:
        return None
    if args.streaming_data and args.rollout_shuffle:
        raise ValueError("--rollout-shuffle needs all rows: it cannot be combined with --streaming-data")
    from slime.rollout.prompt_format import rollout_row_format
    from slime.utils.processing_utils import load_processor, load_tokenizer

    tokenizer = processor = None
    fmt: RowFormat = rollout_row_format(args)
    if args.hf_checkpoint:
        tokenizer = load_tokenizer(args.hf_checkpoint, trust_remote_code=args.trust_remote_code)
        processor = load_processor(args.hf_checkpoint, trust_remote_code=args.trust_remote_code)
        if args.dump_details:
            tokenizer.save_pretrained(os.path.join(args.dump_details, "tokenizer"))
            if processor is not None:
                processor.save_pretrained(os.path.join(args.dump_details, "processor"))
    if args.streaming_data:
        return StreamingPrompts(args.prompt_data, fmt, tokenizer, processor)
    return PromptSet(args.prompt_data, fmt, tokenizer, processor, num_workers=args.num_data_workers)
