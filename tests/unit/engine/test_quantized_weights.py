"""The engine serves quantised checkpoints as the weights that they stand for, and takes updates in parts."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file

from slime.engine.model_config import load_model_config
from slime.engine.weight_updates import UpdateRefused, WeightUpdates
from slime.engine.weights import Weights
from slime.utils.checksum import tensor_checksum
from slime.utils.quantization import quantized, scheme_of
from slime.utils.quantized_folder import fp8_config, int4_config, quantize_folder
from slime.utils.tiny_model import make_tiny_model

CONFIGS = {
    "fp8_blocks": fp8_config((32, 32)),
    "fp8_tensor": fp8_config(None),
    "int4": int4_config(32, True, ["lm_head"]),
    "int4_asymmetric": int4_config(16, False, ["lm_head", "re:.*o_proj"]),
}
UP = "model.layers.1.mlp.up_proj.weight"


@pytest.fixture(params=CONFIGS.values(), ids=CONFIGS.keys())
def pair(request, tmp_path):
    """(plain folder, quantised folder, scheme)."""
    plain = make_tiny_model(tmp_path / "plain", init_std=0.1, tied=False)
    assert quantize_folder(plain, tmp_path / "small", request.param) > 10
    return plain, tmp_path / "small", scheme_of(request.param, "test")


def weights_of(folder) -> Weights:
    weights = Weights(load_model_config(folder), torch.float32, torch.device("cpu"))
    weights.load(folder)
    return weights


def parts_of(folder, scheme, change: float = 0.0) -> dict[str, torch.Tensor]:
    tensors = load_file(folder / "model.safetensors")
    return dict(quantized(((name, tensor + change) for name, tensor in tensors.items()), scheme))


def test_folder_is_served_as_the_weights_that_it_stands_for(pair):
    plain, small, scheme = pair
    weights, original, stored = (
        weights_of(small),
        load_file(plain / "model.safetensors"),
        load_file(small / "model.safetensors"),
    )
    for name, tensor in original.items():
        if scheme.covers(name):
            parts = {part: stored[part] for part in scheme.part_names(name)}
            assert torch.equal(weights.view(name), scheme.dequantize(name, parts))
            assert 0 < (weights.view(name) - tensor).abs().max() < 0.1
        else:
            assert torch.equal(weights.view(name), tensor)
    assert weights.checksums() == {name: tensor_checksum(tensor) for name, tensor in stored.items()}
    assert (small / "tokenizer.json").exists()


def test_updates_change_a_weight_when_its_last_part_has_come(pair):
    plain, small, scheme = pair
    weights, new = weights_of(small), parts_of(plain, scheme, change=0.5)
    before = weights.view(UP).clone()
    last = scheme.part_names(UP)[-1]
    weights.assign({name: tensor for name, tensor in new.items() if name != last})
    assert torch.equal(weights.view(UP), before)
    weights.assign({last: new[last]})
    parts = {part: new[part] for part in scheme.part_names(UP)}
    assert torch.equal(weights.view(UP), scheme.dequantize(UP, parts)) and not torch.equal(weights.view(UP), before)
    assert weights.checksums() == {name: tensor_checksum(tensor) for name, tensor in new.items()}


def test_an_update_without_all_parts_is_an_error_at_its_end(pair):
    plain, small, scheme = pair
    weights, new = weights_of(small), parts_of(plain, scheme, change=0.5)
    updates = WeightUpdates(weights, 1.0)
    updates.begin()
    weights.assign({name: new[name] for name in scheme.part_names(UP)[:-1]})
    with pytest.raises(
        UpdateRefused, match="1 quantised weights came without all their parts, first 'model.layers.1.mlp.up"
    ):
        updates.end()
    updates.begin()
    weights.assign(new)
    updates.end()


def test_an_incomplete_folder_is_refused(pair):
    from slime.utils.weight_file import write_safetensors

    _, small, scheme = pair
    stored = load_file(small / "model.safetensors")
    stored.pop(scheme.part_names(UP)[-1])
    write_safetensors(stored, small / "model.safetensors")
    with pytest.raises(ValueError, match="1 weights missing, first 'model.layers.1.mlp.up_proj.weight_"):
        weights_of(small)
