"""A training shard on its way between processes: ragged tensor columns travel as one flat array each.

Pickling a thousand small tensors costs as much as generating them; one array per column is copied by the object store as it is.
``unpack(pack(shard))`` equals ``shard``; nothing else is known about the columns.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch


@dataclass(frozen=True)
class PackedColumn:
    """Tensors that differ in their first dimension as one array: row i is ``values[sum(lengths[:i]) :][: lengths[i]]``.

    Example:
        [tensor([7, 8]), tensor([9])] -> PackedColumn(values=[7, 8, 9], lengths=[2, 1])
    """

    values: np.ndarray
    lengths: np.ndarray

    def rows(self) -> list[torch.Tensor]:
        # The received array is read-only memory shared with other readers; rows belong to the caller.
        return list(torch.from_numpy(self.values.copy()).split(self.lengths.tolist()))


def pack(shard: dict[str, Any]) -> dict[str, Any]:
    """Replace every column of tensors of one dtype and one shape but for the length; other values stay as they are."""
    return {name: _packed(value) if _is_ragged_column(value) else value for name, value in shard.items()}


def unpack(shard: dict[str, Any]) -> dict[str, Any]:
    """The inverse of ``pack``."""
    return {name: value.rows() if isinstance(value, PackedColumn) else value for name, value in shard.items()}


def _is_ragged_column(value: Any) -> bool:
    if not isinstance(value, list) or not value or not all(isinstance(row, torch.Tensor) for row in value):
        return False
    dtype, shape = value[0].dtype, value[0].shape[1:]
    if dtype == torch.bfloat16 or value[0].dim() == 0:
        return False
    return all(row.dim() > 0 and row.shape[1:] == shape and row.dtype == dtype for row in value)


def _packed(rows: list[torch.Tensor]) -> PackedColumn:
    lengths = np.fromiter((len(row) for row in rows), dtype=np.int64, count=len(rows))
    return PackedColumn(torch.cat(rows).numpy(), lengths)
