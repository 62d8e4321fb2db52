"""Forward pass of a decoder (Llama, Qwen2, Qwen3, Qwen3-MoE) over the slot cache: prefill of new rows, decode of all rows.

A row whose first tokens are in the cache already is read on by `extend`.
Invariants: all passes write keys and values of the tokens they read and return final hidden states, so logits are
computed only where they are asked for; a cache that keeps experts gets those too. Attention and norms follow transformers' formulas; fp32 results agree to
rounding. Knows rows and positions, not requests.
Shapes: B rows, S prompt tokens, H heads, K kv heads, G = H/K, D head dim, N attended length, E hidden size.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from slime.engine import experts
from slime.engine.kv_cache import KVCache, round_up
from slime.engine.lora import TokenAdapters
from slime.engine.model_config import ModelConfig
from slime.engine.weights import Weights

ATTEND_STEP = 16
"""Attended lengths are rounded up to this, which keeps the number of distinct shapes small."""

MASKED = -1e30


class Model:
    """Stateless but for the RoPE tables; weights and cache belong to the caller."""

    def __init__(self, config: ModelConfig, weights: Weights, cache: KVCache, context_length: int):
        self.config, self.weights, self.cache = config, weights, cache
        self.device, self.dtype = next(iter(weights.stored.values())).device, weights.compute_dtype
        positions = torch.arange(context_length, dtype=torch.float32)
        angles = torch.outer(positions, torch.tensor(config.inverse_frequencies(), dtype=torch.float32))
        sin = angles.sin()
        self._cos = torch.cat([angles.cos()] * 2, -1).to(self.device, self.dtype)
        self._sin = torch.cat([-sin, sin], -1).to(self.device, self.dtype)  # signs of rotate_half folded in
        self._count = torch.arange(max(context_length, cache.max_rows * config.num_kv_heads), device=self.device)
        kinds = [0] * config.num_heads + [1] * config.num_kv_heads
        self._head_kinds = torch.tensor(kinds, device=self.device)  # query or key, for the norm of both at once
        self._eps = torch.tensor(config.norm_eps, device=self.device)

    def prefill(self, tokens: torch.Tensor, first_row: int, lora: TokenAdapters | None = None) -> torch.Tensor:
        """Read `tokens` [B, S] (right-padded) into rows first_row.. from position 0; return hidden states [B, S, E]."""
        batch, length = tokens.shape
        rows = slice(first_row, first_row + batch)
        cos, sin = self._cos[:length, None], self._sin[:length, None]
        groups = self.config.num_heads // self.config.num_kv_heads

        def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            q, k, v = (x.view(batch, length, -1, self.config.head_dim).transpose(1, 2) for x in (q, k, v))
            self.cache.keys[layer][rows, :, :length].copy_(k)
            self.cache.values[layer][rows, :, :length].copy_(v)
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=groups > 1)
            return out.transpose(1, 2)

        hidden = F.embedding(tokens.reshape(-1), self.weights.computed["embed"])
        cos = cos.expand(length, 1, -1).repeat(batch, 1, 1)
        sin = sin.expand(length, 1, -1).repeat(batch, 1, 1)
        hidden, chosen = self._layers(hidden, cos, sin, attend, lora)
        if chosen is not None:
            self.cache.experts[rows, :length] = chosen.view(batch, length, *chosen.shape[1:])
        return hidden.view(batch, length, -1)

    def extend(
        self,
        tokens: torch.Tensor,
        first_row: int,
        known: torch.Tensor,
        lengths: torch.Tensor,
        lora: TokenAdapters | None = None,
    ) -> torch.Tensor:
        """Read `tokens` [B, S] (right-padded, `lengths` [B]) into rows first_row.. behind `known` [B] tokens in the cache.

        Returns hidden states [B, S, E].
        """
        batch, size = tokens.shape
        head_dim, rows = self.config.head_dim, slice(first_row, first_row + batch)
        steps = self._count[:size]
        positions = known[:, None] + steps
        at_row, at_step = (steps < lengths[:, None]).nonzero(as_tuple=True)  # padding is not written
        to_row, to_slot = first_row + at_row, positions[at_row, at_step]
        attended = int((known + lengths).max())
        visible = self._count[:attended] <= positions[:, None, :, None]
        groups = self.config.num_heads // self.config.num_kv_heads

        def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            for cache, new in ((self.cache.keys[layer], k), (self.cache.values[layer], v)):
                cache[to_row, :, to_slot] = new.view(batch, size, -1, head_dim)[at_row, at_step]
            keys, values = (c[layer][rows, :, :attended] for c in (self.cache.keys, self.cache.values))
            q = q.view(batch, size, -1, head_dim).transpose(1, 2)
            out = F.scaled_dot_product_attention(q, keys, values, attn_mask=visible, enable_gqa=groups > 1)
            return out.transpose(1, 2)

        flat = positions.clamp(max=len(self._cos) - 1).reshape(-1)
        hidden = F.embedding(tokens.reshape(-1), self.weights.computed["embed"])
        hidden, chosen = self._layers(hidden, self._cos[flat][:, None], self._sin[flat][:, None], attend, lora)
        if chosen is not None:
            self.cache.experts[to_row, to_slot] = chosen.view(batch, size, *chosen.shape[1:])[at_row, at_step]
        return hidden.view(batch, size, -1)

    def decode(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        longest: int,
        first_row: int = 0,
        lora: TokenAdapters | None = None,
    ) -> torch.Tensor:
        """Read one token per row from `first_row` on: `tokens` [B] at `positions` [B]; return hidden states [B, E].

        `longest` is the largest position plus one.
        """
        config, batch = self.config, tokens.shape[0]
        kv_heads, head_dim, length = config.num_kv_heads, config.head_dim, self.cache.length
        attended = min(round_up(longest, ATTEND_STEP), length)
        row_positions = positions.repeat_interleave(kv_heads)  # of the B * K rows of keys
        slots = self._count[: batch * kv_heads] * length + row_positions
        hidden_part = self._count[None, None, :attended] > row_positions[:, None, None]
        mask = hidden_part.to(self.dtype).mul_(MASKED)
        scale = head_dim**-0.5

        def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            caches = (self.cache.keys[layer], self.cache.values[layer])
            keys, values = (c[first_row : first_row + batch].view(-1, length, head_dim) for c in caches)
            keys.view(-1, head_dim).index_copy_(0, slots, k.reshape(-1, head_dim))
            values.view(-1, head_dim).index_copy_(0, slots, v.reshape(-1, head_dim))
            q = q.reshape(batch * kv_heads, -1, head_dim)  # the G heads of a group share their keys
            scores = torch.baddbmm(mask, q, keys[:, :attended].transpose(1, 2), alpha=scale)
            return torch.bmm(scores.softmax(-1), values[:, :attended])

        hidden = F.embedding(tokens, self.weights.computed["embed"])
        hidden, chosen = self._layers(
            hidden, self._cos[positions][:, None], self._sin[positions][:, None], attend, lora
        )
        if chosen is not None:
            self.cache.experts[self._count[first_row : first_row + batch], positions] = chosen
        return hidden

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return fp32 logits [..., V] of final hidden states."""
        stored = self.weights.computed
        return F.linear(hidden, stored["embed" if self.config.tied_embeddings else "head"]).float()

    def _layers(
        self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, attend, lora: TokenAdapters | None
    ) -> tuple:
        """Run all layers over x [T, E] with per-token cos/sin [T, 1, D].

        Returns: final hidden states [T, E], and the experts chosen [T, layers, K] if the cache keeps them, else None.
        """
        config, stored = self.config, self.weights.computed
        num_q, num_kv, tokens = config.num_heads, config.num_kv_heads, x.shape[0]
        chosen: list[torch.Tensor | None] = []
        for i in range(config.num_layers):
            h = self._norm(x, stored[f"{i}.norm1"])
            qkv = self._linear(h, f"{i}.qkv", lora).view(tokens, -1, config.head_dim)
            qk, v = qkv.split([num_q + num_kv, num_kv], 1)
            if config.qk_norm:
                qk = self._norm(qk, stored[f"{i}.qk_norm"].view(2, -1)[self._head_kinds])
            q, k = _rotate(qk, cos, sin).split([num_q, num_kv], 1)
            out = attend(i, q, k, v).reshape(tokens, -1)
            x = x + self._linear(out, f"{i}.o", lora)
            h = self._norm(x, stored[f"{i}.norm2"])
            x = x + (self._experts(i, h, chosen, lora) if config.has_experts(i) else self._mlp(i, h, chosen, lora))
        kept = None if self.cache.experts is None else self._stacked(chosen, tokens)
        return self._norm(x, stored["norm"]), kept

    def _mlp(self, layer: int, h: torch.Tensor, chosen: list, lora: TokenAdapters | None) -> torch.Tensor:
        chosen.append(None)
        gate, up = self._linear(h, f"{layer}.gate_up", lora).chunk(2, -1)
        return self._linear(F.silu(gate) * up, f"{layer}.down", lora)

    def _experts(self, layer: int, h: torch.Tensor, chosen: list, lora: TokenAdapters | None) -> torch.Tensor:
        stored, sizes = self.weights.computed, self.config.experts
        weights, ids = experts.route(h, stored[f"{layer}.router"], sizes.per_token, sizes.normalised)
        chosen.append(ids)
        gate_up = stored[f"{layer}.gate_up"].view(sizes.count, 2 * sizes.width, -1)
        down = stored[f"{layer}.down"].view(sizes.count, -1, sizes.width)
        adapt = None if lora is None else lambda matrix, *rest: lora.add_to_some(f"{layer}.{matrix}", *rest)
        return experts.mix(h, weights, ids, gate_up, down, adapt)

    def _stacked(self, chosen: list[torch.Tensor | None], tokens: int) -> torch.Tensor:
        """Return [T, layers, K]; zeros for layers without experts, as SGLang has it."""
        none = self._count.new_zeros(tokens, self.config.experts.per_token)
        return torch.stack([none if ids is None else ids for ids in chosen], 1).to(self.cache.experts.dtype)

    def _linear(self, x: torch.Tensor, key: str, lora: TokenAdapters | None) -> torch.Tensor:
        """Multiply x [T, in] by a stored matrix, its bias and adapters included."""
        stored = self.weights.computed
        out = F.linear(x, stored[key], stored.get(f"{key}_bias"))
        return out if lora is None else lora.add(key, x, out)

    def _norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        size = x.shape[-1]
        if x.dtype != torch.float32:
            return F.rms_norm(x, (size,), None, self.config.norm_eps) * weight
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)  # fewer and faster operations than F.rms_norm
        return (x * torch.addcmul(self._eps, length, length, value=1 / size).rsqrt_()).mul_(weight)


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Apply RoPE to x [T, heads, D]; sin already carries the signs of rotate_half."""
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), sin)
