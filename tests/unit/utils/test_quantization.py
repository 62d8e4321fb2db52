"""Quantised weights: values written down by hand, the compressed-tensors package, round trips, refusals."""

from __future__ import annotations

import pytest
import torch

from slime.utils.quantization import Assembler, Fp8, Int4, pack_int4, quantized, scheme_of, unpack_int4
from slime.utils.quantized_folder import fp8_config, int4_config

NAME = "model.layers.0.mlp.up_proj.weight"


def random(rows: int, columns: int, dtype=torch.float32) -> torch.Tensor:
    return (torch.randn(rows, columns, generator=torch.Generator().manual_seed(0)) * 0.05).to(dtype)


def test_fp8_blocks_by_hand():
    weight = torch.tensor([[1.0, -2.0, 448.0], [4.0, 0.5, 0.1], [0.0, 0.0, 896.0]])
    parts = dict(Fp8((2, 2)).quantize(NAME, weight))
    assert list(parts) == [NAME, f"{NAME}_scale_inv"]
    scale, stored = parts[f"{NAME}_scale_inv"], parts[NAME]
    # The largest of each 2 x 2 block over 448; a block of zeros has the smallest scale.
    torch.testing.assert_close(scale, torch.tensor([[4 / 448, 1.0], [1e-10 / 448, 2.0]]))
    assert scale.dtype == torch.float32 and stored.dtype == torch.float8_e4m3fn
    # 1, -2, 4, 0.5 over 4 / 448; 0.1 is nearest to 0.1015625 = 2^-4 * 1.625.
    assert stored.float().tolist() == [[112.0, -224.0, 448.0], [448.0, 56.0, 0.1015625], [0.0, 0.0, 448.0]]


def test_fp8_bytes_by_hand():
    """e4m3: sign, four bits of exponent with bias 7, three of mantissa."""
    stored = dict(Fp8(None).quantize(NAME, torch.tensor([[448.0, -1.0, 1.125, 0.0]])))
    assert stored[f"{NAME}_scale"].tolist() == [1.0]
    assert stored[NAME].view(torch.uint8).tolist() == [[0b01111110, 0b10111000, 0b00111001, 0]]


@pytest.mark.parametrize("shape", [(128, 128), (130, 200), (1, 300)])
def test_fp8_error_is_that_of_three_mantissa_bits(shape):
    weight, scheme = random(*shape), Fp8((128, 128))
    back = scheme.dequantize(NAME, dict(scheme.quantize(NAME, weight)))
    assert back.shape == weight.shape
    assert ((back - weight).abs() <= weight.abs() / 16 + weight.abs().max() / 448 / 1024).all()


def test_int4_by_hand():
    weight = torch.tensor([[7.5, -7.5, 1.0, 0.4, 15.0, 0.0, -3.0, 2.9]])
    parts = dict(Int4(4, True).quantize(NAME, weight))
    assert list(parts) == [f"{NAME}_packed", f"{NAME}_scale", f"{NAME}_shape"]
    assert parts[f"{NAME}_scale"].tolist() == [[1.0, 2.0]] and parts[f"{NAME}_shape"].tolist() == [1, 8]
    # 7.5 -> 8 -> cut to 7; -7.5 -> -8; 1; 0.4 -> 0; 15 / 2 -> 7; 0; -1.5 -> -2 (to even); 1.45 -> 1. Plus 8, first lowest.
    assert f"{parts[f'{NAME}_packed'].item() & 0xFFFFFFFF:08x}" == "968f890f"
    assert Int4(4, True).dequantize(NAME, parts).tolist() == [[7.0, -8.0, 1.0, 0.0, 14.0, 0.0, -4.0, 2.0]]


def test_asymmetric_int4_by_hand():
    weight = torch.tensor([[0.0, 15.0, 5.0, 10.0]])
    parts = dict(Int4(4, False).quantize(NAME, weight))
    assert parts[f"{NAME}_scale"].tolist() == [[1.0]]
    assert unpack_int4(parts[f"{NAME}_zero_point"].t(), 1).tolist() == [[-8.0]]
    assert Int4(4, False).dequantize(NAME, parts).tolist() == weight.tolist()


@pytest.mark.parametrize("shape, columns", [((3, 16), 16), ((2, 13), 13)])
def test_packing_is_that_of_compressed_tensors(shape, columns):
    helpers = pytest.importorskip("compressed_tensors.compressors.pack_quantized.helpers")
    pack_to_int32, unpack_from_int32 = helpers.pack_to_int32, helpers.unpack_from_int32
    numbers = torch.randint(-8, 8, shape, generator=torch.Generator().manual_seed(1))
    packed = pack_int4(numbers)
    assert torch.equal(packed, pack_to_int32(numbers.to(torch.int8), 4))
    assert torch.equal(unpack_int4(packed, columns), numbers.float())
    assert torch.equal(unpack_from_int32(packed, 4, numbers.shape).float(), numbers.float())
    by_rows = pack_int4(numbers.t()).t()
    assert torch.equal(by_rows, pack_to_int32(numbers.to(torch.int8), 4, packed_dim=0))


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("group", [32, 128])
def test_int4_values_are_those_of_compressed_tensors(symmetric, group):
    oracle = pytest.importorskip("compressed_tensors.quantization")
    calculate_qparams = oracle.utils.calculate_qparams
    weight, scheme = random(16, 256), Int4(group, symmetric)
    args = oracle.QuantizationArgs(num_bits=4, type="int", symmetric=symmetric, strategy="group", group_size=group)
    groups = weight.unflatten(1, (-1, group))
    scale, zero = calculate_qparams(groups.amin(-1), groups.amax(-1), args)
    expected = oracle.fake_quantize(weight, scale, zero.round() if not symmetric else zero, args)
    parts = dict(scheme.quantize(NAME, weight))
    torch.testing.assert_close(parts[f"{NAME}_scale"], scale)
    torch.testing.assert_close(scheme.dequantize(NAME, parts), expected, atol=1e-6, rtol=1e-5)


def test_what_is_quantised_goes_by_name():
    fp8, int4 = Fp8((128, 128)), Int4(32, True, ("lm_head", "re:.*mlp\\.gate$", "model.layers.1.self_attn"))
    for name, by_fp8, by_int4 in (
        ("model.layers.0.self_attn.q_proj.weight", True, True),
        ("model.layers.1.self_attn.q_proj.weight", True, False),
        ("model.layers.0.self_attn.q_proj.bias", False, False),
        ("model.layers.0.self_attn.q_norm.weight", False, False),
        ("model.layers.0.mlp.experts.3.down_proj.weight", True, True),
        ("model.layers.0.mlp.gate.weight", False, False),
        ("model.layers.0.input_layernorm.weight", False, False),
        ("model.embed_tokens.weight", False, False),
        ("lm_head.weight", False, False),
    ):
        assert (fp8.covers(name), int4.covers(name)) == (by_fp8, by_int4), name


def test_parts_come_in_any_order_and_several_deliveries():
    scheme, weight, other = Fp8((128, 128)), random(4, 8), torch.ones(3)
    parts = dict(quantized([(NAME, weight), ("model.norm.weight", other)], scheme))
    assembler = Assembler(scheme, [NAME, "model.norm.weight"])
    assert assembler.take({f"{NAME}_scale_inv": parts[f"{NAME}_scale_inv"]}) == {}
    assert assembler.incomplete() == [NAME]
    ready = assembler.take({"model.norm.weight": other, NAME: parts[NAME]})
    assert set(ready) == {NAME, "model.norm.weight"} and assembler.incomplete() == []
    torch.testing.assert_close(ready[NAME], weight, atol=0.01, rtol=0.1)
    with pytest.raises(ValueError, match="parts of .*up_proj.weight do not fit together"):
        assembler.take({NAME: parts[NAME], f"{NAME}_scale_inv": torch.ones(3, 3, 3)})


def test_schemes_are_read_from_config_json_or_refused():
    assert scheme_of(None, "x") is None
    assert scheme_of(fp8_config((128, 128)), "x") == Fp8((128, 128))
    assert scheme_of(int4_config(32, True, ["lm_head"]), "x") == Int4(32, True, ("lm_head",))
    for config, message in (
        ({"quant_method": "gptq"}, "quant_method 'gptq' is not supported"),
        ({**fp8_config(None), "activation_scheme": "static"}, "activation_scheme 'static'"),
        ({**int4_config(32, True, []), "format": "marlin-24"}, "format 'marlin-24'"),
    ):
        with pytest.raises(ValueError, match=message):
            scheme_of(config, "x")


def test_groups_must_divide_the_columns():
    with pytest.raises(ValueError, match="up_proj.weight has 48 columns, which int4 groups of 32 do not divide"):
        Int4(32, True).quantize(NAME, random(2, 48))
