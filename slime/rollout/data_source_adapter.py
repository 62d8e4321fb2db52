"""Users' data-source classes in every documented form, behind the interface of `DataSource`.

Accepted: constructors with `(args)` or without arguments; `get_samples` that returns groups, a flat list of samples,
rows or texts; missing `add_samples`, `save`, `load`, `__len__`. Its groups are accounted for like ours: what was in flight at a
checkpoint is handed out again, if the class restores its position itself. Knows no file and no engine.
"""

from __future__ import annotations

import inspect
import logging
from typing import Any

from slime.rollout.data_source import RolloutDataSource
from slime.rollout.group_intake import LOOP, OPTION, take_in
from slime.rollout.ledgered_source import DataSource, LedgeredSource, group_indices
from slime.rollout.subclass_accounts import keep_accounts
from slime.utils.async_utils import finish
from slime.utils.hook_calls import naming, wrong
from slime.utils.types import Sample

logger = logging.getLogger(__name__)


def adapt_class(args, cls: Any) -> DataSource:
    """An instance of the user's class, wrapped unless it is one of ours."""
    with naming(OPTION, args.data_source_path):
        source = cls(args) if _takes_args(cls) else cls()
    if not callable(getattr(source, "get_samples", None)):
        raise wrong(OPTION, args.data_source_path, f"gave a {type(source).__name__} without get_samples")
    return as_data_source(args, source)


def as_data_source(args, source: Any) -> DataSource:
    """`source` itself when it has the whole interface, else an adapter around it."""
    if isinstance(source, RolloutDataSource):
        return keep_accounts(source)
    return source if isinstance(source, DataSourceAdapter) else DataSourceAdapter(args, source)


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
                wanted = num_samples - len(groups)
                groups += take_in(self, type(self.source).__name__, self._call("get_samples", wanted), wanted)
            for group in groups:
                self._note_in_flight(group)
            return groups

    def _call(self, name: str, *args: Any) -> Any:
        method = getattr(self.source, name, None)
        if method is None:
            return None
        # Several threads ask us, one at a time asks the class.
        with self._lock, naming(OPTION, self.args.data_source_path):
            return finish(method(*args), LOOP)

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
