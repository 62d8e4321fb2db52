"""One table for both directions: which Hugging Face tensors make up which Megatron parameter, and how.

Invariants: `to_hf(kind, to_megatron(kind, tensors))` gives the same bits back; a Megatron name has one rule. Works on
whole tensors: tensor-parallel shards, pipeline stages and vocabulary padding are the callers' business.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch

_QKV = tuple(f"self_attn.{x}_proj" for x in "qkv")
_GATE_UP = ("mlp.gate_proj", "mlp.up_proj")

# Megatron name within a layer -> (kind, Hugging Face names within the layer): qwen2, qwen3, llama, and qwen3_moe's experts.
# The norms have two names: fused into the following linear layer by Transformer Engine, modules of their own otherwise.
_LAYER = {
    "input_layernorm.weight": ("copy", ("input_layernorm.weight",)),
    "self_attention.linear_qkv.layer_norm_weight": ("copy", ("input_layernorm.weight",)),
    "self_attention.linear_qkv.weight": ("qkv", tuple(f"{x}.weight" for x in _QKV)),
    "self_attention.linear_qkv.bias": ("qkv", tuple(f"{x}.bias" for x in _QKV)),
    "self_attention.q_layernorm.weight": ("copy", ("self_attn.q_norm.weight",)),
    "self_attention.k_layernorm.weight": ("copy", ("self_attn.k_norm.weight",)),
    "self_attention.linear_proj.weight": ("copy", ("self_attn.o_proj.weight",)),
    "self_attention.linear_proj.bias": ("copy", ("self_attn.o_proj.bias",)),
    "pre_mlp_layernorm.weight": ("copy", ("post_attention_layernorm.weight",)),
    "mlp.linear_fc1.layer_norm_weight": ("copy", ("post_attention_layernorm.weight",)),
    "mlp.linear_fc1.weight": ("gate_up", tuple(f"{x}.weight" for x in _GATE_UP)),
    "mlp.linear_fc1.bias": ("gate_up", tuple(f"{x}.bias" for x in _GATE_UP)),
    "mlp.linear_fc2.weight": ("copy", ("mlp.down_proj.weight",)),
    "mlp.linear_fc2.bias": ("copy", ("mlp.down_proj.bias",)),
    "mlp.router.weight": ("copy", ("mlp.gate.weight",)),
    "mlp.router.expert_bias": ("copy", ("mlp.gate.e_score_correction_bias",)),
}
_EXPERT = {
    "linear_fc1": ("gate_up", ("mlp.experts.{}.gate_proj.weight", "mlp.experts.{}.up_proj.weight")),
    "linear_fc2": ("copy", ("mlp.experts.{}.down_proj.weight",)),
}
_GLOBAL = {
    "embedding.word_embeddings.weight": ("vocab", ("model.embed_tokens.weight",)),
    "output_layer.weight": ("vocab", ("lm_head.weight",)),
    "decoder.final_layernorm.weight": ("copy", ("model.norm.weight",)),
}
_LAYER_NAME = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
_EXPERT_NAME = re.compile(r"mlp\.experts\.(linear_fc[12])\.weight(\d+)")


@dataclass(frozen=True)
class Rule:
    """How one Megatron parameter is assembled: `kind` is copy, vocab (rows may be padded), qkv or gate_up."""

    kind: str
    hf_names: tuple[str, ...]


def rule_for(megatron_name: str) -> Rule:
    """Return the rule of a parameter named with its global layer (and expert) number.

    >>> rule_for("decoder.layers.3.mlp.linear_fc2.weight").hf_names
    ('model.layers.3.mlp.down_proj.weight',)

    Raises: ValueError for a parameter outside the table.
    """
    if megatron_name in _GLOBAL:
        return Rule(*_GLOBAL[megatron_name])
    match = _LAYER_NAME.fullmatch(megatron_name)
    expert = _EXPERT_NAME.fullmatch(match[2]) if match else None
    if match is None or not (expert or match[2] in _LAYER):
        raise ValueError(f"no Hugging Face name is known for the Megatron parameter {megatron_name!r}")
    kind, names = _EXPERT[expert[1]] if expert else _LAYER[match[2]]
    number = expert[2] if expert else ""
    return Rule(kind, tuple(f"model.layers.{match[1]}.{name.format(number)}" for name in names))


def to_megatron(kind: str, tensors: list[torch.Tensor], config) -> torch.Tensor:
    """Join whole Hugging Face tensors into the whole Megatron parameter (without vocabulary padding)."""
    if kind == "qkv":
        groups = config.num_query_groups
        return torch.cat([x.reshape(groups, -1, *x.shape[1:]) for x in tensors], dim=1).flatten(0, 1)
    return torch.cat(tensors) if kind == "gate_up" else tensors[0]


def to_hf(kind: str, tensor: torch.Tensor, config, vocab_size: int) -> list[torch.Tensor]:
    """Split a whole Megatron parameter into the Hugging Face tensors of its rule; padded vocabulary rows are dropped."""
    if kind == "vocab":
        return [tensor[:vocab_size]]
    if kind == "gate_up":
        return list(tensor.chunk(2))
    if kind == "qkv":
        groups, dim = config.num_query_groups, config.kv_channels
        sizes = [config.num_attention_heads // groups * dim, dim, dim]
        parts = tensor.reshape(groups, sum(sizes), *tensor.shape[1:]).split(sizes, dim=1)
        return [x.flatten(0, 1) for x in parts]
    return [tensor]


def tensor_shard(kind: str, tensor: torch.Tensor, dim: int, rank: int, size: int) -> torch.Tensor:
    """Return the part of a whole Megatron parameter that tensor rank `rank` of `size` holds.

    A gate_up shard is [gate shard; up shard], so each half is cut on its own.
    """
    if size == 1:
        return tensor
    if kind == "gate_up":
        return torch.cat([half.chunk(size, dim)[rank] for half in tensor.chunk(2)], dim=dim)
    return tensor.chunk(size, dim)[rank]


def join_shards(kind: str, shards: list[torch.Tensor], dim: int) -> torch.Tensor:
    """Undo `tensor_shard` for all ranks."""
    if len(shards) == 1:
        return shards[0]
    if kind == "gate_up":
        halves = [shard.chunk(2, dim) for shard in shards]
        return torch.cat([h[0] for h in halves] + [h[1] for h in halves], dim=dim)
    return torch.cat(shards, dim=dim)
