"""Checksums of weights, equal on the trainer and on the engine.

Invariants: the value depends on dtype, shape and the raw bytes in row-major order, and on nothing else (device,
strides, storage offset). Two tensors that are equal bit for bit have the same checksum; NaN payloads count.
Does not know names: the caller pairs a name with each checksum.
"""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

_CHUNK_BYTES = 64 * 1024 * 1024


def tensor_checksum(tensor: torch.Tensor) -> str:
    """Return the checksum of `tensor` as 8 hexadecimal digits.

    >>> import torch
    >>> a = torch.arange(6, dtype=torch.float32).view(2, 3)
    >>> tensor_checksum(a) == tensor_checksum(a.t().contiguous().t())
    True
    >>> tensor_checksum(a) == tensor_checksum(a.view(3, 2))
    False
    """
    import torch

    data = tensor.detach().cpu().contiguous()
    value = zlib.crc32(f"{data.dtype}{tuple(data.shape)}".encode())
    raw = data.reshape(-1).view(torch.uint8)
    for start in range(0, raw.numel(), _CHUNK_BYTES):
        value = zlib.crc32(raw[start : start + _CHUNK_BYTES].numpy(), value)
    return f"{value:08x}"
