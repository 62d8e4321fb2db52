"""Attention and rotary embedding over a packed stream equal the same sequence by sequence."""

import random

import pytest
import torch
import torch.nn.functional as F

LENGTHS = {
    "equal": [14] * 9,
    "mixed": [3, 40, 4, 3, 1, 100, 39, 17],
    "one": [5],
    "with_empty": [4, 0, 4],
}


def attention(groups=2, heads=4, dim=8):
    from types import SimpleNamespace

    from slime.backends.megatron_utils.local_layers import SDPACoreAttention

    config = SimpleNamespace(kv_channels=dim, attention_dropout=0.0)
    layer = SDPACoreAttention.__new__(SDPACoreAttention)
    torch.nn.Module.__init__(layer)
    layer.config, layer.scale, layer.dropout = config, dim**-0.5, 0.0
    return layer, heads, groups, dim


def one_by_one(q, k, v, lengths, scale):
    outs = []
    for a, b, c in zip(q.split(lengths), k.split(lengths), v.split(lengths), strict=True):
        if len(a):
            a, b, c = (x.transpose(0, 1)[None] for x in (a, b, c))
            out = F.scaled_dot_product_attention(a, b, c, is_causal=True, scale=scale, enable_gqa=True)
            outs.append(out[0].transpose(0, 1))
    return torch.cat(outs).flatten(1)


@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS.keys())
def test_bucketed_attention_equals_per_sequence_with_gradients(lengths):
    from slime.backends.megatron_utils.packed_sequences import PackedBatchParams

    layer, heads, groups, dim = attention()
    generator = torch.Generator().manual_seed(0)
    total = sum(lengths)
    inputs = [torch.randn(total, n, dim, generator=generator, requires_grad=True) for n in (heads, groups, groups)]
    packed = PackedBatchParams.from_lengths(lengths, torch.device("cpu"))
    ours = layer(*inputs, packed_seq_params=packed)
    theirs = one_by_one(*inputs, lengths, layer.scale)
    torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=0)
    weights = torch.randn(ours.shape, generator=generator)
    for a, b in zip(
        torch.autograd.grad((ours * weights).sum(), inputs),
        torch.autograd.grad((theirs * weights).sum(), inputs),
        strict=True,
    ):
        torch.testing.assert_close(a, b, atol=2e-6, rtol=0)


def test_buckets_cover_every_token_once_and_waste_little():
    from slime.backends.megatron_utils.packed_sequences import make_buckets

    rng = random.Random(0)
    for _ in range(20):
        lengths = [rng.randint(1, 300) for _ in range(rng.randint(1, 60))]
        buckets = make_buckets(lengths, torch.device("cpu"))
        padded = sum(b.num_rows * b.length for b in buckets)
        if buckets[0].rows is None:
            assert padded == sum(lengths)
            continue
        tokens = torch.cat([b.tokens for b in buckets])
        assert sorted(tokens.tolist()) == list(range(sum(lengths)))
        assert padded <= sum(max(n / 0.9, n + 8) for n in lengths) + 1e-6


def test_packed_rope_equals_megatrons_per_sequence_version():
    from megatron.core import parallel_state as mpu
    from megatron.core.models.common.embeddings import rope_utils
    from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding

    from slime.backends.megatron_utils import packed_rope

    packed_rope.install()
    ours = rope_utils._apply_rotary_pos_emb_thd
    lengths = [5, 17, 1, 9]
    offsets = torch.tensor([0, *lengths]).cumsum(0).int()
    freqs = RotaryEmbedding(8, 1.0, use_cpu_initialization=True).forward(20)
    x = torch.randn(sum(lengths), 2, 12)
    group = mpu.get_context_parallel_group()
    expected = ours.apply_sliced(x, offsets, freqs, cp_group=group)
    torch.testing.assert_close(ours(x, offsets, freqs, cp_group=group), expected, atol=1e-6, rtol=0)
    other = torch.tensor([0, 32]).int()
    assert not torch.allclose(
        ours(x, other, RotaryEmbedding(8, 1.0, use_cpu_initialization=True).forward(32), cp_group=group), expected
    )


def test_pack_predicts_exactly_the_response_tokens():
    from slime.backends.megatron_utils.data import pack

    tokens = [torch.tensor([5, 6, 7, 8]), torch.tensor([9, 10, 11])]
    batch = pack(tokens, [2, 1], [0, 1], 4, torch.device("cpu"))
    assert batch.tokens.tolist() == [[5, 6, 7, 8, 9, 10, 11, 0]]
    assert batch.positions.tolist() == [[0, 1, 2, 3, 0, 1, 2, 0]]
    assert batch.rows.tolist() == [1, 2, 5]
    assert batch.targets.tolist() == [7, 8, 11]
    with pytest.raises(ValueError, match="no prompt token"):
        pack(tokens, [4, 1], [0, 1], 1, torch.device("cpu"))


def test_rotation_and_swiglu_have_the_gradients_of_their_formulas():
    from slime.backends.megatron_utils.local_layers import swiglu
    from slime.backends.megatron_utils.packed_rope import _Rotate

    generator = torch.Generator().manual_seed(0)
    x = torch.randn(7, 3, 8, generator=generator, dtype=torch.float64, requires_grad=True)
    angles = torch.randn(7, 1, 4, generator=generator, dtype=torch.float64).repeat(1, 1, 2)
    assert torch.autograd.gradcheck(lambda t: _Rotate.apply(t, angles.cos(), angles.sin()), x)
    first, second = x.chunk(2, dim=-1)
    expected = x * angles.cos() + torch.cat((-second, first), dim=-1) * angles.sin()
    torch.testing.assert_close(_Rotate.apply(x, angles.cos(), angles.sin()), expected)
    assert torch.autograd.gradcheck(swiglu, x)
    torch.testing.assert_close(swiglu(x), F.silu(first) * second)
