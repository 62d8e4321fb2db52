"""Zigzag slices: every token exactly once, round trips, the owner of the last token; FLOPs estimate."""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest
import torch

from slime.batching.context_parallel import (
    last_token_owner,
    merge_response,
    slice_response,
    slice_sequence,
    zigzag_share,
)
from slime.batching.flops import ModelShape, moe_layers, sample_flops


@pytest.mark.parametrize("cp_size", [1, 2, 4, 8])
@pytest.mark.parametrize("seed", range(10))
def test_every_response_token_has_one_owner_and_the_round_trip_is_exact(cp_size, seed):
    rng = random.Random(seed)
    response = rng.randint(1, 60)
    total = response + rng.randint(1, 60)
    shares = [zigzag_share(total, response, cp_size, rank) for rank in range(cp_size)]
    owned = [t for share in shares for start, end in share.tokens for t in range(start, end)]
    assert sorted(owned) == list(range(total - response, total))
    column = torch.arange(response, dtype=torch.float32)
    parts = [slice_response(column, total, response, cp_size, rank) for rank in range(cp_size)]
    assert [len(part) for part in parts] == [share.num_tokens for share in shares]
    assert torch.equal(merge_response(parts, total, response), column)
    owner = last_token_owner(total, response, cp_size)
    assert parts[owner][-1] == response - 1


@pytest.mark.parametrize("cp_size", [1, 2, 4])
def test_sequence_slices_cover_the_padded_sequence(cp_size):
    tokens = torch.arange(1, 12)
    parts = [slice_sequence(tokens, cp_size, rank) for rank in range(cp_size)]
    assert len({len(part) for part in parts}) == 1
    assert sorted(t for part in parts for t in part.tolist() if t) == tokens.tolist()


def make_args(**changes):
    values = dict(
        hidden_size=8, num_attention_heads=4, multi_latent_attention=False, kv_channels=2, num_query_groups=2,
        group_query_attention=True, num_layers=3, ffn_hidden_size=16, num_experts=None, moe_ffn_hidden_size=None,
        moe_router_topk=2, moe_shared_expert_intermediate_size=None, moe_layer_freq=1, padded_vocab_size=None, vocab_size=32,
        q_lora_rank=None, kv_lora_rank=None, qk_head_dim=None, qk_pos_emb_head_dim=None, v_head_dim=None,
    )  # fmt: skip
    return SimpleNamespace(**{**values, **changes})


def test_dense_flops_by_hand():
    length = 5
    projections = 8 * 2 * 4 + 2 * 8 * 2 * 2 + 4 * 2 * 8
    expected = 3 * (2 * length * projections + 2 * length * length * 8 + 2 * length * 3 * 8 * 16) + 2 * length * 8 * 32
    assert sample_flops(length, ModelShape.from_args(make_args())) == expected


def test_moe_layers_use_the_routed_width():
    args = make_args(
        num_experts=8, moe_ffn_hidden_size=4, moe_shared_expert_intermediate_size=6, moe_layer_freq=[0, 1, 1]
    )
    assert ModelShape.from_args(args).mlp_width_total == 16 + 2 * (4 * 2 + 6)
    assert moe_layers(2, 4) == [True, False, True, False] and moe_layers([0, 1], 2) == [False, True]


def test_latent_attention_has_its_own_projections():
    args = make_args(
        multi_latent_attention=True, q_lora_rank=3, kv_lora_rank=5, qk_head_dim=2, qk_pos_emb_head_dim=1, v_head_dim=2
    )
    shape = ModelShape.from_args(args)
    assert shape.projection_params == 8 * 3 + 3 * 4 * 3 + 8 * 6 + 5 * 4 * 4 + 4 * 2 * 8
    assert shape.attention_width == 4 * (3 + 2) / 2
