"""Users' data-source classes in every documented form, behind the interface of `DataSource`.

Accepted: constructors with `(args)` or without arguments; `get_samples` that returns groups, a flat list of samples,
rows or texts; missing `add_samples`, `save`, `load`, `__len__`. Its groups are accounted for like ours: what was in flight at a
checkpoint is handed out again, if the class restores its position itself. Knows no file and no engine.
"""

from __future__ import annotations

import inspect
import logging
from typing import Any

from slime.rollout.base_types import leaves_of
from slime.rollout.data_source import RolloutDataSource
from slime.rollout.ledgered_source import DataSource, LedgeredSource, group_indices
from slime.rollout.sample_state import duplicate_group
from slime.utils.async_utils import finish
from slime.utils.data import RowFormat, row_to_sample
from slime.utils.hook_calls import naming, wrong
from slime.utils.media_values import keeps_samples, settle_media
from slime.utils.types import Sample

logger = logging.getLogger(__name__)

OPTION = "data_source_path"


def adapt_class(args, cls: Any) -> DataSource:
    """An instance of the user's class, wrapped unless it is one of ours."""
    with naming(OPTION, args.data_source_path):
        source = cls(args) if _takes_args(cls) else cls()
    if not callable(getattr(source, "get_samples", None)):
        raise wrong(OPTION, args.data_source_path, f"gave a {type(source).__name__} without get_samples")
    return as_data_source(args, source)


def as_data_source(args, source: Any) -> DataSource:
    """`source` itself when it has the whole interface, else an adapter around it."""
    if isinstance(source, (RolloutDataSource, DataSourceAdapter)):
        return source
    return DataSourceAdapter(args, source)


def _takes_args(cls: Any) -> bool:
    parameters = inspect.signature(cls).parameters.values()
    return any(p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD, p.VAR_POSITIONAL) for p in parameters)


class DataSourceAdapter(LedgeredSource):
    """Groups and numbers what the user's `get_samples` returns; passes everything else on where it exists."""

    def __init__(self, args, source: Any) -> None:
        super().__init__(args)
        self.source = source

    def __getattr__(self, name: str) -> Any:
        if name == "source":
            raise AttributeError(name)
        return getattr(self.source, name)

    def get_samples(self, num_samples: int) -> list[list[Sample]]:
        with self._lock:
            groups = self._take_requeued(num_samples)
            if len(groups) < num_samples:
                groups += self._numbered_groups(num_samples - len(groups))
            for group in groups:
                self._note_in_flight(group)
            return groups

    def _numbered_groups(self, num_samples: int) -> list[list[Sample]]:
        found = self._call("get_samples", num_samples)
        if not hasattr(found, "__iter__") or isinstance(found, str | dict):
            raise wrong(OPTION, self.args.data_source_path, f"get_samples returned a {type(found).__name__}")
        found = list(found)
        groups = [item if isinstance(item, list) and _is_group(item) else None for item in found]
        if any(group is None for group in groups):
            groups = self._group([self._sample(item) for item in found], num_samples)
        leaves = leaves_of(groups)
        if not all(groups) or len({id(leaf) for leaf in leaves}) < len(leaves):
            what = "a sample twice" if all(groups) else "an empty group"
            raise wrong(OPTION, self.args.data_source_path, f"get_samples returned {what}")
        for leaf in leaves:
            settle_media(leaf, keeps_samples(self.args), f"--data-source-path {self.args.data_source_path}")
        options = self.args.apply_chat_template_kwargs or {}
        for leaf in leaves:
            leaf.apply_chat_template_kwargs = leaf.apply_chat_template_kwargs or dict(options)
        taken: set[int] = set()
        return [self._numbered(group, taken) for group in groups]

    def _sample(self, item: Any) -> Sample:
        if isinstance(item, Sample):
            return item
        if isinstance(item, dict):
            where = f"{type(self.source).__name__}.get_samples"
            return row_to_sample(item, where, RowFormat.from_args(self.args).detect_keys(item))
        if isinstance(item, (str, list)):
            return Sample(prompt=item)
        raise wrong(OPTION, self.args.data_source_path, f"get_samples returned a list with a {type(item).__name__}")

    def _group(self, samples: list[Sample], num_samples: int) -> list[list[Sample]]:
        """Flat samples as groups: `num_samples` whole groups in a row, else one prompt each, copied: the class may keep its own."""
        size = self.args.n_samples_per_prompt
        if size > 1 and len(samples) == num_samples * size:
            return [samples[i : i + size] for i in range(0, len(samples), size)]
        return [sample.duplicates(size) for sample in samples]

    def _numbered(self, group: list, taken: set[int]) -> list:
        """The group with numbers of its own; a copy where the class gave it those of a group that is still being worked on.

        Args:
            taken: group indices of this call, added to.
        """
        given = {leaf.group_index for leaf in leaves_of(group)}
        is_taken = len(given) > 1 or any(index in taken or self.ledger.is_open(index) for index in given)
        if is_taken:
            group = duplicate_group(group)
        number = self._next_group_index(taken) if is_taken or None in given else given.pop()
        indices = [next((leaf.index for leaf in leaves_of(item)), None) for item in group]
        if is_taken or None in indices or len(set(indices)) < len(indices):  # equal ones would sample the same response
            for item in group:
                self._index_as_one(leaves_of(item))
        for leaf in leaves_of(group):
            leaf.group_index = number
        taken.add(number)
        return group

    def _index_as_one(self, parts: list[Sample]) -> None:
        index = self._next_index()
        for part in parts:
            part.index = index

    def _next_group_index(self, taken: set[int]) -> int:
        """A number that no group has had."""
        while (number := self.sample_group_index) in taken or self._is_known(number):
            self.sample_group_index += 1
        self.sample_group_index += 1
        return number

    def _is_known(self, group_index: int) -> bool:
        return self.ledger.is_open(group_index) or self.ledger.outcome_of(group_index) is not None

    def _call(self, name: str, *args: Any) -> Any:
        method = getattr(self.source, name, None)
        if method is None:
            return None
        with (
            self._lock,
            naming(OPTION, self.args.data_source_path),
        ):  # several threads ask us, one at a time asks the class
            return finish(method(*args))

    def add_samples(self, samples: list[list[Sample]]) -> None:
        """Passed on, and then the class's to keep or to drop; without `add_samples` they are dropped, which is an end."""
        if not samples:
            return
        if not hasattr(self.source, "add_samples"):
            self.mark_finished(samples, "aged_out")
            return
        with self._lock:
            for group_index in group_indices(samples):
                if group_index not in self.ledger.delivered:  # a group that is trained now may be kept all the same
                    self.ledger.withdraw(group_index)
            self._call("add_samples", samples)

    def mark_finished(self, samples: list, outcome: str = "trained") -> None:
        super().mark_finished(samples, outcome)
        self._call("mark_finished", samples, outcome)

    def mark_delivered(self, samples: list, rollout_id: int) -> None:
        super().mark_delivered(samples, rollout_id)
        self._call("mark_delivered", samples, rollout_id)

    def stats(self) -> dict[str, Any]:
        return {**super().stats(), **(self._call("stats") or {})}

    def state_dict(self) -> dict[str, Any]:
        with self._lock:
            counters = {"sample_group_index": self.sample_group_index, "sample_index": self.sample_index}
            return {"adapter": counters, "source": self._call("state_dict"), **self._ledger_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        with self._lock:
            self.sample_group_index = state["adapter"]["sample_group_index"]
            self.sample_index = state["adapter"]["sample_index"]
            if state["source"] is None and not hasattr(self.source, "load"):
                name = type(self.source).__name__
                logger.warning("%s has no state_dict: its position in the data is not restored", name)
                return  # it starts again: handing out what was in flight would repeat prompts
            if state["source"] is not None:
                self._call("load_state_dict", state["source"])
            self._load_ledger_state(state)

    def save(self, rollout_id: int) -> None:
        self._call("save", rollout_id)

    def load(self, rollout_id: int | None = None) -> None:
        self._call("load", rollout_id)

    def __len__(self) -> int:
        return len(self.source) if hasattr(self.source, "__len__") else 0


def _is_group(item: list) -> bool:
    return all(isinstance(leaf, Sample) for leaf in leaves_of(item))
