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

_FUSED = {
    **dict.fromkeys(("q_proj", "k_proj", "v_proj"), "qkv_proj"),
    **dict.fromkeys(("gate_proj", "up_proj"), "gate_up_proj"),
}
_VOCAB_WEIGHTS = ("model.embed_tokens.weight", "lm_head.weight")
_VOCAB_MULTIPLE = 64


def sglang_checksums(named_tensors: Iterable[tuple[str, torch.Tensor]]) -> dict[str, str]:
    """Return SGLang's name -> checksum for tensors under Hugging Face names.

    The parts of a fused tensor must come in the order of the model (q, k, v; gate, up), as every checkpoint has them.
    """
    hashes: dict[str, hashlib._Hash] = {}
    for name, tensor in named_tensors:
        fused = ".".join(_FUSED.get(part, part) for part in name.split("."))
        hasher = hashes.setdefault(fused, hashlib.sha256())
        hasher.update(_bytes_of(tensor))
        if name in _VOCAB_WEIGHTS:
            padding_rows = -tensor.shape[0] % _VOCAB_MULTIPLE
            hasher.update(bytes(padding_rows * tensor.shape[1] * tensor.element_size()))
    return {name: hasher.digest()[:8].hex() for name, hasher in hashes.items()}


def overall_checksum(checksums: dict[str, str]) -> str:
    """Return the checksum of all checksums and their names.

    >>> overall_checksum({"a": "1", "b": "2"}) == overall_checksum({"b": "2", "a": "1"})
    True
    """
    hasher = hashlib.sha256()
    for name in sorted(checksums):
        hasher.update(name.encode() + checksums[name].encode())
    return hasher.hexdigest()


def _bytes_of(tensor: torch.Tensor):
    import torch

    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
