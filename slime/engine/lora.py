"""Named low-rank adapters beside the served model: loaded, unloaded, and added to the outputs of its linear layers.

The requests of one batch may go through different adapters, or none. Factors of projections that are stored fused are fused
too: A stacked, B block-diagonal with the scaling in it, so that an adapter costs two small products per stored matrix.
Invariants: an adapter is complete and fits the model before anybody sees it; one that is being unloaded takes no new requests
and is dropped when the last of its own has ended. Shapes: N tokens, R stacked rank.
"""

from __future__ import annotations

import itertools
import re
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.nn.functional as F

from slime.engine.weights import Weights
from slime.utils import peft_format
from slime.utils.checksum import tensor_checksum

#: Stored matrices to which adapters can add, by the last part of their key.
TARGETS = ("qkv", "o", "gate_up", "down")
_EXPERT = re.compile(r"\.experts\.(\d+)\.")
TENSOR_PATH = "__tensor__"
"""Path of an adapter that came as tensors, in SGLang's words."""


@dataclass(frozen=True)
class Adapter:
    """factors: key of a matrix -> (A [R, in], B [out, R]). number: above 0, never used twice.

    A key is that of a stored matrix, with `:3` behind it for the part of expert 3.
    """

    name: str
    path: str
    number: int
    factors: dict[str, tuple[torch.Tensor, torch.Tensor]] = field(repr=False)
    checksums: dict[str, str] = field(repr=False)


class AdapterStore:
    """The adapters of one engine. Read from any thread, changed on the engine thread."""

    def __init__(self, weights: Weights):
        self._weights = weights
        self._rows: dict[str, tuple[int, int]] = {}  # key of a matrix -> its rows in the stored one
        for name, at in weights.layout.items():
            key = _key(name, at.stored)
            start, end = self._rows.get(key, (at.start, at.end))
            self._rows[key] = (min(start, at.start), max(end, at.end))
        self._loaded: dict[str, Adapter] = {}
        self._retired: dict[str, Adapter] = {}  # no new requests; the waiting ones may still start
        self._gone: set[str] = set()  # names of dropped ones
        self._numbers = itertools.count(1)

    def paths(self) -> dict[str, str]:
        """Return name -> path of what new requests may ask for."""
        return {name: adapter.path for name, adapter in list(self._loaded.items())}

    def checksums(self) -> dict[str, dict[str, str]]:
        """Return name -> tensor name -> checksum, as the tensors came."""
        return {name: adapter.checksums for name, adapter in list(self._loaded.items())}

    def require(self, name: str, paused: bool) -> None:
        """Raises: ValueError when a new request cannot have this adapter. While generation is `paused` one that was there
        may be in replacement; the request will wait, and get what is loaded then."""
        if name not in self._loaded and not (paused and (name in self._retired or name in self._gone)):
            raise ValueError(
                f"The following requested LoRA adapters are not loaded: {name}\nLoaded adapters: {list(self._loaded)}."
            )

    def of_request(self, name: str | None) -> Adapter | None:
        """Return what a waiting request asked for; it may have been unloaded and loaded anew since.

        Raises: ValueError when it is gone.
        """
        if name is None:
            return None
        if name in self._loaded or name in self._retired:
            return self._loaded.get(name) or self._retired[name]
        raise ValueError(f"the LoRA adapter {name!r} was unloaded while the request waited")

    def make(self, name: str, config: dict, tensors: dict[str, torch.Tensor], path: str) -> Adapter:
        """Build an adapter from PEFT's config and tensors, which are copied; it is not loaded yet. Any thread may do it.

        Raises: ValueError when it is not a plain LoRA of the served model.
        """
        peft_format.check_config(config, f"adapter {name}")
        pairs = peft_format.factors_by_module(tensors)
        if not pairs:
            raise ValueError(f"adapter {name} has no tensors")
        scaling, by_key = peft_format.scaling_of(config), {}
        for module, pair in pairs.items():
            key = self._check(name, module, *pair, config["r"])
            by_key.setdefault(key, {})[module] = pair
        factors = {key: self._fuse(key, parts, scaling) for key, parts in by_key.items()}
        checksums = {tensor_name: tensor_checksum(tensor) for tensor_name, tensor in tensors.items()}
        return Adapter(name, path, next(self._numbers), factors, checksums)

    def add(self, adapter: Adapter) -> None:
        """Raises: ValueError when the name is taken: unload first."""
        if adapter.name in self._retired:
            raise ValueError(
                f"LoRA adapter {adapter.name!r} has an incomplete unload; unload it again before loading it"
            )
        if adapter.name in self._loaded:
            raise ValueError(f"Failed to load LoRA adapter {adapter.name} because it is already loaded")
        self._loaded[adapter.name] = adapter

    def retire(self, name: str) -> None:
        """Take no new requests for an adapter. Doing it twice is harmless.

        Raises: ValueError when there is none of that name.
        """
        if name in self._loaded:
            self._retired[name] = self._loaded.pop(name)
        elif name not in self._retired:
            raise ValueError(f"LoRA with name {name} does not exist. Loaded LoRAs: {list(self._loaded)}")

    def drop(self, name: str) -> None:
        """Forget a retired adapter; requests that run with it keep theirs."""
        if self._retired.pop(name, None) is not None:
            self._gone.add(name)

    def _check(self, name: str, module: str, a: torch.Tensor, b: torch.Tensor, rank: int) -> str:
        """Return the key of the matrix that holds a module."""
        location = self._weights.layout.get(f"{module}.weight")
        if location is None or location.stored.rpartition(".")[2] not in TARGETS:
            raise ValueError(f"adapter {name}: the served model has no linear layer {module!r} for it")
        out, width = location.shape
        if tuple(a.shape) != (rank, width) or tuple(b.shape) != (out, rank):
            raise ValueError(
                f"adapter {name}: factors of {module!r} have shapes {list(a.shape)} and {list(b.shape)}, expected "
                f"{[rank, width]} and {[out, rank]}"
            )
        return _key(module, location.stored)

    def _fuse(self, key: str, parts: dict, scaling: float) -> tuple[torch.Tensor, torch.Tensor]:
        weights = self._weights
        first, end = self._rows[key]
        a = torch.cat([pair[0] for pair in parts.values()])
        b = torch.zeros(end - first, a.shape[0])
        start = 0
        for module, (_, factor) in parts.items():
            at = weights.layout[f"{module}.weight"]
            b[at.start - first : at.end - first, start : start + factor.shape[1]] = factor.float() * scaling
            start += factor.shape[1]
        return tuple(x.to(weights.device, weights.compute_dtype, copy=True) for x in (a, b))


def _key(name: str, stored: str) -> str:
    expert = _EXPERT.search(name)
    return stored if expert is None else f"{stored}:{expert[1]}"


class TokenAdapters:
    """Which tokens of a pass go through which adapter: (adapter, positions [n], None for all tokens)."""

    def __init__(self, parts: list[tuple[Adapter, torch.Tensor | None]]):
        self._parts = parts

    def add(self, key: str, x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """Return out [N, rows] of the stored matrix `key` on x [N, in] with the adapters' part; out is changed."""
        for adapter, at in self._parts:
            if key not in adapter.factors:
                continue
            a, b = adapter.factors[key]
            if at is None:
                out = out.addmm_(F.linear(x, a), b.t())
            else:
                out.index_add_(0, at, F.linear(F.linear(x[at], a), b))
        return out

    def add_to_some(self, key: str, x: torch.Tensor, out: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """The same where x [n, in] and out [n, rows] are of the pass's tokens at positions `tokens` [n] only."""
        for adapter, at in self._parts:
            if key in adapter.factors:
                a, b = adapter.factors[key]
                mine = slice(None) if at is None else torch.isin(tokens, at).nonzero().squeeze(1)
                out[mine] += F.linear(F.linear(x[mine], a), b)
        return out


def token_adapters(rows: list[Adapter | None], tokens_per_row: int, device: torch.device) -> TokenAdapters | None:
    """Return the adapters of a pass over rows of equally many tokens; None when no row has one."""
    numbers = np.array([0 if adapter is None else adapter.number for adapter in rows])
    if not numbers.any():
        return None
    parts = []
    for number in np.unique(numbers[numbers > 0]).tolist():
        mine = np.flatnonzero(numbers == number)
        at = None
        if len(mine) < len(rows):
            positions = (mine[:, None] * tokens_per_row + np.arange(tokens_per_row)).reshape(-1)
            at = torch.from_numpy(positions).to(device)
        parts.append((rows[int(mine[0])], at))
    return TokenAdapters(parts)
