"""Groups of samples as plain data for a checkpoint, and back.

Invariant: what `encode_group` returns loads with `torch.load(weights_only=True)`. Raw media of a data set row are not
stored; they come back from the row. Does not know files.
"""

from __future__ import annotations

import copy
from typing import Any

from slime.utils.types import Sample


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
