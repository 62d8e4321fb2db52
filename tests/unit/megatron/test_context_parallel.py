"""Zigzag parts of packed samples: every response token is predicted once, attention over parts is that over wholes."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from slime.backends.megatron_utils.context_parallel import lay_zigzag
from slime.backends.megatron_utils.packed_sequences import PackedBatchParams, Zigzag
from tests.unit.megatron.megatron_helpers import random_tokens

CPU = torch.device("cpu")
LENGTHS, RESPONSES = (9, 30, 2, 17, 3, 28), (4, 20, 1, 9, 0, 27)


def parts(size: int, multiple: int = 1) -> list:
    tokens = random_tokens(LENGTHS)
    return [lay_zigzag(tokens, RESPONSES, multiple, Zigzag(size, rank), CPU) for rank in range(size)]


@pytest.mark.parametrize("size", [2, 4])
def test_each_response_token_is_predicted_on_one_rank(size):
    tokens = random_tokens(LENGTHS)
    before = torch.cat([t[len(t) - n - 1 : len(t) - 1] for t, n in zip(tokens, RESPONSES, strict=True)])
    streams = parts(size)
    own = torch.cat([stream.own for stream in streams])
    assert own.sort().values.tolist() == list(range(sum(RESPONSES)))
    for stream in streams:
        assert torch.equal(stream.tokens[stream.rows], before[stream.own])


@pytest.mark.parametrize("multiple", [1, 3, 8])
def test_streams_of_all_ranks_are_equally_long_and_padded(multiple):
    sizes = {len(stream.tokens) for stream in parts(2, multiple)}
    assert len(sizes) == 1 and sizes.pop() % multiple == 0


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("kv_heads", [4, 2])
def test_attention_over_parts_is_attention_over_wholes(monkeypatch, size, kv_heads):
    from megatron.core import tensor_parallel

    from slime.backends.megatron_utils.local_layers import SDPACoreAttention

    config = SimpleNamespace(attention_dropout=0.0, kv_channels=8)
    monkeypatch.setattr(SDPACoreAttention, "__init__", lambda self: torch.nn.Module.__init__(self))
    attention = SDPACoreAttention()
    attention.scale, attention.dropout = config.kv_channels**-0.5, 0.0
    padded = [Zigzag(size, 0).padded(n) for n in LENGTHS]
    generator = torch.Generator().manual_seed(0)
    heads = (4, kv_heads, kv_heads)
    whole = [torch.randn(sum(padded), h, 8, generator=generator, requires_grad=True) for h in heads]
    expected = attention(*whole, packed_seq_params=PackedBatchParams.from_lengths(padded, CPU))

    streams = parts(size)
    starts = torch.tensor([0, *padded]).cumsum(0)
    places = []
    for rank, stream in enumerate(streams):
        local = torch.repeat_interleave(starts[:-1], torch.tensor(padded) // size)
        places.append(local + stream.positions[: len(local)])
        assert stream.packed.part == Zigzag(size, rank)
    keys = torch.cat([torch.cat([whole[1][p], whole[2][p]], dim=-1) for p in places])
    monkeypatch.setattr(tensor_parallel, "gather_from_sequence_parallel_region", lambda x, group: keys)
    found = torch.zeros_like(expected)
    for stream, place in zip(streams, places, strict=True):
        out = attention(*(w[place] for w in whole), packed_seq_params=stream.packed)
        found = found.index_copy(0, place, out)
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-5)
    weights = torch.randn(expected.shape, generator=generator)
    gradients = torch.autograd.grad((expected * weights).sum(), whole)
    for one, many in zip(gradients, torch.autograd.grad((found * weights).sum(), whole), strict=True):
        torch.testing.assert_close(many, one, atol=1e-6, rtol=1e-5)
