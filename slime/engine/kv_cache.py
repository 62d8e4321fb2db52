"""Key/value cache: one pair of tensors per layer, [rows, kv_heads, length, head_dim].

A running request owns one row; rows 0..n-1 are the running ones, so a decode step reads a slice and gathers nothing. When a
request ends the last row moves into its place. Capacity in rows and length follows the requests; `rows_that_fit` is the
bound that the byte budget puts on it. Of a mixture of experts the cache can also keep which experts read each token.
Invariant: everything in the cache is finite (masked positions are multiplied by zero, and zero times NaN is NaN).
Does not know requests.
"""

from __future__ import annotations

import numpy as np
import torch

from slime.engine.model_config import ModelConfig

LENGTH_STEP = 64
EXPERT_DTYPE = torch.int16
ROW_STEP = 16
OVERSIZE = 4
"""An idle cache longer than this multiple of what is needed is made anew."""


class KVCache:
    """Rows of keys and values for all layers."""

    def __init__(
        self,
        config: ModelConfig,
        dtype: torch.dtype,
        device: torch.device,
        budget_bytes: int,
        max_rows: int,
        keeps_experts: bool = False,
    ):
        self.num_layers = config.num_layers
        self._heads, self._head_dim = config.num_kv_heads, config.head_dim
        self._dtype, self._device = dtype, device
        self.budget_bytes, self.max_rows = budget_bytes, max_rows
        item_bytes = torch.empty(0, dtype=dtype).element_size()
        self.bytes_per_token = 2 * config.num_layers * config.num_kv_heads * config.head_dim * item_bytes
        self._expert_shape = (config.num_layers, config.experts.per_token) if keeps_experts else (0, 0)
        self.bytes_per_token += self._expert_shape[0] * self._expert_shape[1] * EXPERT_DTYPE.itemsize
        self.rows, self.length = 0, 0
        self.keys: list[torch.Tensor] = []
        self.values: list[torch.Tensor] = []
        self.experts = self._empty_experts(0, 0) if keeps_experts else None  # [rows, length, layers, experts a token]

    def rows_that_fit(self, length: int) -> int:
        """Return how many rows of `length` tokens the budget holds; one is always let in."""
        return max(1, min(self.max_rows, self.budget_bytes // (self.bytes_per_token * round_up(length, LENGTH_STEP))))

    def reserve(self, rows: int, length: int, num_live: int) -> None:
        """Make room for `rows` rows of `length` tokens, keeping the contents of the first `num_live` rows."""
        length = round_up(length, LENGTH_STEP)
        fits = rows <= self.rows and length <= self.length
        if fits and (num_live or self.length <= OVERSIZE * length):
            return
        if not num_live:
            self.drop()
        length = max(length, self.length)
        wanted = max(round_up(rows, ROW_STEP), 2 * self.rows)  # doubling keeps the number of copies small
        self._reallocate(max(rows, min(wanted, self.rows_that_fit(length))), length, num_live)

    def drop(self) -> None:
        """Free all memory; contents are lost."""
        self.keys, self.values, self.rows, self.length = [], [], 0, 0
        if self.experts is not None:
            self.experts = self._empty_experts(0, 0)

    def move_rows(self, source: list[int], target: list[int], length: int) -> None:
        """Copy the first `length` tokens of rows `source` onto rows `target`."""
        at, to = torch.tensor(source, device=self._device), torch.tensor(target, device=self._device)
        for cache in (*self.keys, *self.values):
            cache[to, :, :length] = cache[at, :, :length]
        if self.experts is not None:
            self.experts[to, :length] = self.experts[at, :length]

    def copy_rows(self, source: np.ndarray, first: int, length: int) -> None:
        """Copy the first `length` tokens of rows `source` (repeats allowed) onto rows first, first + 1, ..."""
        at = torch.from_numpy(source).to(self._device)
        for cache in (*self.keys, *self.values):
            cache[first : first + len(source), :, :length].copy_(cache[at, :, :length])
        if self.experts is not None:
            self.experts[first : first + len(source), :length] = self.experts[at, :length]

    def num_bytes(self) -> int:
        return self.rows * self.length * self.bytes_per_token

    def _reallocate(self, rows: int, length: int, num_live: int) -> None:
        # Zero pages cost no memory before they are written, so a large reservation is cheap until it is used.
        for caches in (self.keys, self.values):
            for layer in range(self.num_layers):
                new = torch.zeros(rows, self._heads, length, self._head_dim, dtype=self._dtype, device=self._device)
                if num_live:
                    old = caches[layer]
                    new[:num_live, :, : old.shape[2]].copy_(old[:num_live])
                    caches[layer] = new
                else:
                    caches.append(new)
        if self.experts is not None:
            old, self.experts = self.experts, self._empty_experts(rows, length)
            self.experts[:num_live, : old.shape[1]] = old[:num_live]
        self.rows, self.length = rows, length

    def _empty_experts(self, rows: int, length: int) -> torch.Tensor:
        return torch.zeros(rows, length, *self._expert_shape, dtype=EXPERT_DTYPE, device=self._device)


def round_up(value: int, step: int) -> int:
    """Return the smallest multiple of `step` that is not below `value`."""
    return -(-value // step) * step
