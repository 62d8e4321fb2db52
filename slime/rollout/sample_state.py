"""Groups of samples as plain data for a checkpoint, and back; copies of groups.

Invariant: what `encode_group` returns loads with `torch.load(weights_only=True)`. Raw media of a data set row are not
stored; they come back from the row. Does not know files.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from slime.rollout.base_types import leaves_of
from slime.utils.types import Sample

_PLAIN = frozenset({type(None), str, int, float, bool})


def duplicate_group(group: Any) -> Any:
    """A copy that shares nothing mutable with the group; a sample may stand in it several times."""
    if isinstance(group, list):
        return [duplicate_group(item) for item in group]
    return group.duplicate()


def renumber(group: Any, group_index: int, next_index: Callable[[], int]) -> None:
    """Give the samples of a group numbers of their own, in place.

    Parts of one execution keep sharing an index and a rollout_id; new ids are negative, where no user's own ids are.
    """
    indices: dict[int | None, int] = {}
    executions: dict[int, int] = {}
    for leaf in leaves_of(group):
        if leaf.index is None or leaf.index not in indices:
            indices[leaf.index] = next_index()
        leaf.group_index, leaf.index = group_index, indices[leaf.index]
        if leaf.rollout_id is not None:
            leaf.rollout_id = executions.setdefault(leaf.rollout_id, -1 - leaf.index)


def encode_group(group: Any) -> Any:
    """Nested lists of samples as nested lists of plain dicts."""
    if isinstance(group, list):
        return [encode_group(item) for item in group]
    data = group.to_dict()
    if data.get("data_row") is not None:
        data["multimodal_inputs"] = None
    return _plain(data)


def decode_group(data: Any, dataset: Any) -> Any:
    """Inverse of `encode_group`; `dataset[row]` supplies the media."""
    if isinstance(data, list):
        return [decode_group(item, dataset) for item in data]
    sample = Sample.from_dict(copy.deepcopy(data))
    row = data.get("data_row")
    if row is not None and dataset is not None:
        sample.multimodal_inputs = dataset[row].multimodal_inputs
    return sample


def _plain(value: Any) -> Any:
    """Arrays as tensors and tuples as lists; what is neither plain nor a tensor becomes its text."""
    if value is None or isinstance(value, (str, int, float, bool)):
        return value
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        if set(map(type, value)) <= _PLAIN:  # token lists are long
            return list(value)
        return [_plain(item) for item in value]
    import numpy as np
    import torch

    if isinstance(value, torch.Tensor):
        return value
    if isinstance(value, np.ndarray):
        return torch.from_numpy(value.copy())
    if isinstance(value, np.generic):
        return value.item()
    return str(value)
