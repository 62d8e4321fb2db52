"""Cuts a stream of named tensors into buckets of bounded size."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def buckets(
    named_tensors: Iterable[tuple[str, torch.Tensor]], max_bytes: int
) -> Iterator[list[tuple[str, torch.Tensor]]]:
    """Yield consecutive lists of at most ``max_bytes``; a tensor larger than that travels alone.

    Order is kept, nothing is copied, and no list is empty.
    """
    bucket: list[tuple[str, torch.Tensor]] = []
    num_bytes = 0
    for name, tensor in named_tensors:
        tensor_bytes = tensor.numel() * tensor.element_size()
        if bucket and num_bytes + tensor_bytes > max_bytes:
            yield bucket
            bucket, num_bytes = [], 0
        bucket.append((name, tensor))
        num_bytes += tensor_bytes
    if bucket:
        yield bucket
