"""Keys and values of ended requests, kept so that a later request that begins with the same tokens need not read them again.

Invariants: what is kept was computed with the weights that are served now (a change of weights empties the store), and the store
together with the cache of the running requests stays within the byte budget: the least recently used goes first. Looking one up
costs about the same however many are kept: they are sorted, and the longest common beginning is that of a neighbour.
Called on the engine thread only. Knows no requests.
"""

from __future__ import annotations

import bisect
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from slime.engine.kv_cache import KVCache

MIN_TOKENS = 16
"""Shorter common beginnings are not worth the copies."""


@dataclass(eq=False)
class Prefix:
    """Keys and values of `num_tokens` tokens: `planes` is [2 * layers, kv_heads, tokens, head_dim], keys first.

    `experts` [tokens, layers, experts a token] if the cache keeps them. `key`: of `_key`.
    """

    key: bytes
    num_tokens: int
    planes: torch.Tensor
    experts: torch.Tensor | None


@dataclass(frozen=True)
class Match:
    """The first `length` tokens of a request are the first ones of `prefix`."""

    prefix: Prefix
    length: int


class PrefixStore:
    """Kept prefixes of one cache, in order of use.

    Args:
        weights_version: returns a value that is another one after each change of the weights.
    """

    def __init__(self, cache: KVCache, weights_version: Callable[[], int], enabled: bool = True):
        self._cache, self._weights_version, self._enabled = cache, weights_version, enabled
        self._kept: OrderedDict[int, Prefix] = OrderedDict()  # by identity, least recently used first
        self._sorted: list[Prefix] = []  # by key
        self._version = weights_version()
        self.num_tokens = 0

    def __len__(self) -> int:
        return len(self._kept)

    def num_bytes(self) -> int:
        return self.num_tokens * self._cache.bytes_per_token

    def find(self, tokens: Sequence[int], limit: int, adapter: int = 0) -> Match | None:
        """Return the longest beginning of `tokens` kept under the same adapter, cut to `limit` tokens.

        None when it is too short to matter.
        """
        self._check_version()
        if limit < MIN_TOKENS or not self._kept:
            return None
        wanted = _key(tokens[:limit], adapter)
        place = self._place(wanted)
        near = self._sorted[max(0, place - 1) : place + 1]
        length, best = max(((_common_length(prefix.key, wanted), prefix) for prefix in near), key=lambda pair: pair[0])
        if length < MIN_TOKENS:
            return None
        self._kept.move_to_end(id(best))
        return Match(best, length)

    def keep(
        self, row: int, tokens: Sequence[int], version: int, replaces: Match | None = None, adapter: int = 0
    ) -> None:
        """Copy the first len(tokens) cache entries of `row`, computed under weights `version`, out of the cache.

        `replaces`: what the row was started from; it is dropped when the new one contains all of it.
        """
        self._check_version()
        if not self._enabled or version != self._version or len(tokens) < MIN_TOKENS:
            return
        if replaces is not None and replaces.length == replaces.prefix.num_tokens:
            self._remove(replaces.prefix)
        key = _key(tokens, adapter)
        place = self._place(key)
        if place < len(self._sorted) and self._sorted[place].key == key:
            self._kept.move_to_end(id(self._sorted[place]))
            return
        if not self._make_room(len(tokens)):
            return
        layers = (*self._cache.keys, *self._cache.values)
        planes = torch.stack([layer[row, :, : len(tokens)] for layer in layers])
        experts = None if self._cache.experts is None else self._cache.experts[row, : len(tokens)].clone()
        prefix = Prefix(key, len(tokens), planes, experts)
        self._kept[id(prefix)] = prefix
        self._sorted.insert(self._place(key), prefix)
        self.num_tokens += len(tokens)

    def restore(self, match: Match, row: int) -> None:
        """Write the matched tokens' keys and values into a cache row."""
        for layer, plane in zip((*self._cache.keys, *self._cache.values), match.prefix.planes, strict=True):
            layer[row, :, : match.length].copy_(plane[:, : match.length])
        if match.prefix.experts is not None:
            self._cache.experts[row, : match.length] = match.prefix.experts[: match.length]

    def fit(self) -> None:
        """Drop what the running requests' cache has grown over."""
        self._make_room(0)

    def clear(self) -> None:
        self._kept.clear()
        self._sorted.clear()
        self.num_tokens = 0

    def _check_version(self) -> None:
        if self._weights_version() != self._version:
            self._version = self._weights_version()
            self.clear()

    def _make_room(self, num_tokens: int) -> bool:
        """Drop the least recently used until `num_tokens` more fit; returns False when they cannot."""
        free = self._cache.budget_bytes - self._cache.num_bytes() - num_tokens * self._cache.bytes_per_token
        while self._kept and self.num_bytes() > free:
            self._remove(next(iter(self._kept.values())))
        return free >= self.num_bytes()

    def _remove(self, prefix: Prefix) -> None:
        if self._kept.pop(id(prefix), None) is not None:
            del self._sorted[self._place(prefix.key)]
            self.num_tokens -= prefix.num_tokens

    def _place(self, key: bytes) -> int:
        """Where `key` stands among the sorted ones, or would."""
        return bisect.bisect_left(self._sorted, key, key=lambda prefix: prefix.key)


def _key(tokens: Sequence[int], adapter: int) -> bytes:
    """Bytes that sort as the tokens do, those of one adapter together."""
    return np.array([adapter, *tokens], dtype=">u4").tobytes()


def _common_length(a: bytes, b: bytes) -> int:
    """How many tokens two keys begin with in common; -1 under different adapters."""
    size = min(len(a), len(b)) // 4
    different = np.flatnonzero(np.frombuffer(a, ">u4", size) != np.frombuffer(b, ">u4", size))
    return (int(different[0]) if len(different) else size) - 1
