"""Checksums of weights as SGLang reports them on a CPU, for an engine that is not split over devices.

SGLang holds q/k/v and gate/up as one tensor each, under names of its own, with the rows of the vocabulary padded by zeros.
Its hash covers the bytes of a tensor alone, neither dtype nor shape. On a GPU it hashes otherwise, which is not known here.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

#: name of a fused part -> (name of the whole, place in it)
_FUSED = {
    "q_proj": ("qkv_proj", 0),
    "k_proj": ("qkv_proj", 1),
    "v_proj": ("qkv_proj", 2),
    "gate_proj": ("gate_up_proj", 0),
    "up_proj": ("gate_up_proj", 1),
}
_NUM_PARTS = {"qkv_proj": 3, "gate_up_proj": 2}
_VOCAB_WEIGHTS = ("model.embed_tokens.weight", "lm_head.weight")
_VOCAB_MULTIPLE = 64


def sglang_checksums(named_tensors: Iterable[tuple[str, torch.Tensor]]) -> dict[str, str]:
    """Return SGLang's name -> checksum for tensors under Hugging Face names, in any order.

    Only the parts of tensors that are not complete yet are held. One that stays incomplete has no checksum.
    """
    checksums: dict[str, str] = {}
    waiting: dict[str, dict[int, torch.Tensor]] = {}
    for name, tensor in named_tensors:
        words = name.split(".")
        fused = next((word for word in words if word in _FUSED), None)
        if fused is None:
            checksums[name] = _digest([tensor], pads_vocab=name in _VOCAB_WEIGHTS)
            continue
        whole, place = _FUSED[fused]
        full_name = ".".join(whole if word == fused else word for word in words)
        parts = waiting.setdefault(full_name, {})
        parts[place] = tensor
        if len(parts) == _NUM_PARTS[whole]:
            checksums[full_name] = _digest([parts[i] for i in sorted(parts)], pads_vocab=False)
            del waiting[full_name]
    return checksums


def overall_checksum(checksums: dict[str, str]) -> str:
    """Return the checksum of all checksums and their names.

    >>> overall_checksum({"a": "1", "b": "2"}) == overall_checksum({"b": "2", "a": "1"})
    True
    """
    hasher = hashlib.sha256()
    for name in sorted(checksums):
        hasher.update(name.encode() + checksums[name].encode())
    return hasher.hexdigest()


def _digest(parts: list[torch.Tensor], pads_vocab: bool) -> str:
    import torch

    hasher = hashlib.sha256()
    for tensor in parts:
        hasher.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
        if pads_vocab:
            padding_rows = -tensor.shape[0] % _VOCAB_MULTIPLE
            hasher.update(bytes(padding_rows * tensor.shape[1] * tensor.element_size()))
    return hasher.digest()[:8].hex()
