"""Groups of samples as plain data for a checkpoint, and back; copies of groups.

Invariant: what `encode_group` returns loads with `torch.load(weights_only=True)`. Media of a data set row are not stored as long
as they are the row's; they come back from there. Does not know files.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from slime.rollout.base_types import leaves_of
from slime.utils.plain_data import Shared, fields_from_plain, fields_to_plain, same
from slime.utils.types import Sample


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


def encode_group(group: Any, dataset: Any = None, shared: Shared | None = None) -> Any:
    """Nested lists of samples as nested lists of plain dicts; media that are those of `dataset.origin_samples[row]` are left out.

    Media that several samples of the group have are one object in what is returned.
    """
    shared = shared or Shared()
    if isinstance(group, list):
        return [encode_group(item, dataset, shared) for item in group]
    data = group.to_dict()
    row = data.get("data_row")
    if row is not None and dataset is not None:
        if same(group.multimodal_inputs, dataset.origin_samples[row].multimodal_inputs):
            data["multimodal_inputs"] = None
        elif group.multimodal_inputs is None:  # taken away: None would bring them back
            data["multimodal_inputs"] = {}
    return fields_to_plain(data, shared)


def decode_group(data: Any, dataset: Any, shared: Shared | None = None) -> Any:
    """Inverse of `encode_group`; `dataset.origin_samples[row]` supplies the media that were left out."""
    shared = shared or Shared()
    if isinstance(data, list):
        return [decode_group(item, dataset, shared) for item in data]
    sample = Sample.from_dict(fields_from_plain(data, shared))
    row = data.get("data_row")
    if row is not None and dataset is not None and sample.multimodal_inputs is None:
        sample.multimodal_inputs = dataset.origin_samples[row].duplicate().multimodal_inputs
    return sample
