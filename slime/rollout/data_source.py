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
from typing import Any

from slime.rollout.base_types import leaves_of
from slime.rollout.buffer_filter import own_filter, pick, pop_first
from slime.rollout.ledgered_source import DataSource, LedgeredSource, group_indices
from slime.rollout.prompt_format import load_prompts
from slime.rollout.sample_state import decode_group, duplicate_group, encode_group, renumber
from slime.rollout.subclass_accounts import groups_in
from slime.utils.data import PromptSet
from slime.utils.misc import load_hook
from slime.utils.streaming_data import StreamingPrompts
from slime.utils.types import Sample

__all__ = ["DataSource", "RolloutDataSource", "RolloutDataSourceWithBuffer", "create_data_source", "pop_first"]

logger = logging.getLogger(__name__)

STATE_FIELDS = ("sample_offset", "epoch_id", "sample_group_index", "sample_index", "metadata", "stream_rows")


class RolloutDataSource(LedgeredSource):
    """Prompts of `--prompt-data`, epoch after epoch, without a buffer for unfinished work."""

    def __init__(self, args) -> None:
        super().__init__(args)
        self.sample_offset = 0
        self.epoch_id = 0
        self.metadata: dict[str, Any] = {}
        self.stream_rows: int | None = None  # rows of a whole pass over a stream, once one was made
        self.makes_groups = False  # a subclass makes some itself, or puts the prompts into an order of its own
        self.held_back: set[int] = set()  # groups that a subclass took from us and has not given out yet
        self.dataset = load_prompts(args)
        self._order_by = self._wanted_order()
        self._order = self._epoch_order()

    # ---- handing out -----------------------------------------------------------------------------------------------

    def get_samples(self, num_samples: int) -> list[list[Sample]]:
        with self._lock:
            groups = self._take_requeued(num_samples)
            for group in groups:
                self._note_in_flight(group)
            return groups + [self._next_group() for _ in range(num_samples - len(groups))]

    def _next_group(self) -> list[Sample]:
        if isinstance(self.dataset, StreamingPrompts):
            prompt = self._next_streamed(self.dataset)
            return self._new_group(prompt, self.epoch_id, self.sample_offset - 1)
        if self.dataset is None:
            return self._new_group(Sample(), None, None)
        if self.sample_offset >= len(self.dataset):
            self.epoch_id += 1
            self.sample_offset = 0
            self._begin_order(self._wanted_order())
        place = self.sample_offset
        prompt, self.sample_offset = self.dataset.samples[place], place + 1
        if place < len(self._order) and prompt is self.dataset.origin_samples[self._order[place]]:
            return self._new_group(prompt, self.epoch_id, self._order[place])
        self.makes_groups = True  # a subclass has changed `samples`: the order says nothing of this one
        return self._new_group(prompt, None, None)

    def _next_streamed(self, stream: StreamingPrompts) -> Sample:
        before, sample = stream.position, stream.next()
        self._leave_out(before, stream.position - (sample is not None))
        if sample is None:
            self.stream_rows = stream.position
            self.epoch_id += 1
            stream.rewind()
            sample = stream.next()
            self._leave_out(0, stream.position - 1)
        self.sample_offset = stream.position
        return sample

    def _leave_out(self, start: int, stop: int) -> None:
        for row in range(start, stop):
            self.ledger.leave_out(self.epoch_id, row)

    def _new_group(self, prompt: Sample, epoch: int | None, row: int | None) -> list[Sample]:
        group = prompt.duplicates(self.args.n_samples_per_prompt)
        in_memory = row is not None and isinstance(self.dataset, PromptSet)
        for sample in group:
            sample.group_index, sample.index = self.sample_group_index, self._next_index()
            sample.data_row = row if in_memory else None
        self.ledger.open(self.sample_group_index, epoch=epoch, row=row)
        self.sample_group_index += 1
        self._note_in_flight(group, rebuildable=in_memory)
        return group

    def _wanted_order(self) -> dict[str, Any]:
        return {"seed": self.args.rollout_seed, "shuffle": self.args.rollout_shuffle}

    def _begin_order(self, order_by: dict[str, Any]) -> None:
        """Order the present epoch by these."""
        if self.dataset is not None and self._order_by["shuffle"] and not order_by["shuffle"]:
            self.dataset.unshuffle()
        self._order_by = order_by
        self._order = self._epoch_order()

    def _epoch_order(self) -> list[int]:
        """Rows in the order of the epoch, which `dataset.samples` has from now on, for subclasses that read it."""
        order = list(range(len(self)))
        if self._order_by["shuffle"]:
            random.Random(self._order_by["seed"] + self.epoch_id).shuffle(order)
            if self.dataset is not None:
                self.dataset.shuffle(self.epoch_id, self._order_by["seed"])
        return order

    def add_samples(self, samples: list[list[Sample]]) -> None:
        """Without a buffer, groups that come back are dropped for this epoch and counted as aged out."""
        self.mark_finished(samples, "aged_out")

    def stats(self) -> dict[str, Any]:
        with self._lock:
            return {"epoch": self.epoch_id, **super().stats()}

    # ---- checkpoints -----------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Everything needed to go on: plain values and tensors only."""
        with self._lock:
            state = {name: copy.deepcopy(getattr(self, name)) for name in STATE_FIELDS}
            stream = self.dataset.mark() if isinstance(self.dataset, StreamingPrompts) else None
            data_set = {"rows": len(self), "path": self.args.prompt_data, "stream": stream, **self._order_by}
            data_set["makes_groups"] = self.makes_groups
            data_set["rows_digest"] = None if self.dataset is None else self.dataset.digest()
            return {**state, **self._ledger_state(self.dataset), "data_set": data_set}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        with self._lock:
            self._check_same_data(state["data_set"])
            self.makes_groups = state["data_set"].get("makes_groups", False)
            for name in STATE_FIELDS:
                setattr(self, name, copy.deepcopy(state[name]))
            self._begin_order({name: state["data_set"][name] for name in ("seed", "shuffle")})
            if isinstance(self.dataset, StreamingPrompts):
                self.dataset.rewind(state["data_set"]["stream"])
            self._load_ledger_state(state, self.dataset)
            self._requeued += self._buffered(state)  # of a source with a buffer

    def _buffered(self, state: dict[str, Any]) -> list[list[Sample]]:
        groups = [decode_group(group, self.dataset) for group in state.get("buffer", [])]
        return self._fitted(groups, state)

    def _check_same_data(self, saved: dict[str, Any]) -> None:
        streamed = isinstance(self.dataset, StreamingPrompts)
        if saved["rows"] != len(self) or streamed != (saved["stream"] is not None):
            there = "a stream (--streaming-data)" if saved["stream"] is not None else f"{saved['rows']} prompts"
            raise ValueError(
                f"the checkpoint was written with {there}, --prompt-data {self.args.prompt_data} now gives "
                f"{'a stream' if streamed else len(self)}; continue with the same data, or start over with --no-resume"
            )
        if self.dataset is not None and saved.get("rows_digest") not in (None, self.dataset.digest()):
            if streamed:
                raise ValueError(
                    f"the checkpoint was written with other rows: --prompt-data {saved['path']} then, {self.args.prompt_data} now, "
                    "another slice or another first row, so its place in the stream means nothing; continue with the same "
                    "data, or start over with --no-resume"
                )
            logger.warning(
                "--prompt-data %s does not hold the prompts or labels that the checkpoint was written with (%s): this epoch goes on "
                "with the rows of the new data that stand where rows are left in the old",
                self.args.prompt_data,
                saved["path"],
            )
        if {name: saved[name] for name in ("seed", "shuffle")} != self._wanted_order():
            logger.warning(
                "--rollout-seed or --rollout-shuffle differ from the checkpoint: this epoch keeps its order, the next one follows "
                "the flags"
            )

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
    """The default: prompts plus a FIFO buffer of groups that came back (partial, surplus, user-pushed).

    A group that comes back after it was delivered to training is kept for another training (off-policy reuse): a copy with
    numbers of its own, with its stored tokens, log-probs, versions and reward.
    """

    def __init__(self, args) -> None:
        super().__init__(args)
        self.buffer: list[list[Sample]] = []
        if not hasattr(self, "buffer_filter"):  # a method of a subclass
            self.buffer_filter = own_filter(args)

    def get_samples(self, num_samples: int) -> list[list[Sample]]:
        with self._lock:
            groups = self._get_samples_from_buffer(num_samples)
            for group in groups:
                self._note_in_flight(group)
            return groups + super().get_samples(num_samples - len(groups))

    def _get_samples_from_buffer(self, num_samples: int) -> list[list[Sample]]:
        """At most so many groups, taken out of the buffer. Subclasses call it or have one of their own."""
        if not self.buffer or num_samples <= 0:
            return []
        if self.buffer_filter is pop_first:
            return pop_first(self.args, None, self.buffer, num_samples)
        before = group_indices(self.buffer)
        picked = pick(self.args, self, self.buffer, num_samples)
        still_here = {*group_indices(self.buffer), *group_indices(picked)}
        for group_index in before:
            if group_index not in still_here:  # the filter threw it away
                self.ledger.settle(group_index, "aged_out")
        return picked

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
            self.buffer.extend(self._adopted(group) for group in samples)

    def _adopted(self, group: list) -> list:
        """The group as it waits in the buffer: what was in flight as it is, anything else under numbers of its own."""
        group_index = leaves_of(group)[0].group_index
        if group_index in self.ledger.in_flight and group_index not in self.ledger.delivered:
            self.ledger.take_back(group_index)
            return group
        known = group_index is not None and (
            self.ledger.is_open(group_index) or self.ledger.outcome_of(group_index) is not None
        )
        if known:
            return self._reused(group, self.ledger.round_of(group_index))
        self._renumber(group, reuse=False)  # pushed by the user
        return group

    def _reused(self, group: list, rollout_id: int | None) -> list:
        """A copy to train once more, with the round that it was trained in as its age."""
        copied = duplicate_group(group)
        for leaf in leaves_of(copied):
            leaf.metadata.setdefault("reused_group", leaf.group_index)
            if rollout_id is not None:
                leaf.metadata.setdefault("start_rollout_id", rollout_id)
        self._renumber(copied, reuse=True)
        return copied

    def _renumber(self, group: list, reuse: bool) -> None:
        renumber(group, self.sample_group_index, self._next_index)
        self.ledger.open(self.sample_group_index, reuse=reuse)
        self.sample_group_index += 1

    def mark_delivered(self, samples: list, rollout_id: int) -> None:
        """See the base class. A group that was put into the buffer and is trained all the same is one kept for reuse."""
        with self._lock:
            delivered = set(group_indices(samples)) & self.ledger.waiting.keys()
            kept = groups_in(self.buffer) if delivered else ()
            for group in [group for group in kept if leaves_of(group)[0].group_index in delivered]:
                position = next(i for i, other in enumerate(self.buffer) if other is group)
                self._note_in_flight(group)
                self.buffer[position] = self._reused(group, rollout_id)
            super().mark_delivered(samples, rollout_id)

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
            groups = groups_in(self.buffer)
            if len(groups) < len(self.buffer):
                logger.warning(
                    "the buffer of %s holds %d entries that are no groups: its own save and load have to keep them",
                    type(self).__name__,
                    len(self.buffer) - len(groups),
                )
            return {**super().state_dict(), "buffer": [encode_group(group, self.dataset) for group in groups]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        with self._lock:
            super().load_state_dict({**state, "buffer": []})
            self.buffer = self._buffered(state)


def create_data_source(args) -> DataSource:
    """The data source of `--data-source-path`, in whatever documented form its class has."""
    from slime.rollout.data_source_adapter import adapt_class

    return adapt_class(args, load_hook(args.data_source_path, "data_source_path"))


def _state_path(folder: str, rollout_id: int) -> str:
    return os.path.join(folder, "rollout", f"global_dataset_state_dict_{rollout_id}.pt")
