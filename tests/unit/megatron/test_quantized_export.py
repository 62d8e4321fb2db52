"""A trainer on a quantised checkpoint: starts from the weights that it stands for, exports in its form."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file

from slime.backends.megatron_utils.hf_to_megatron.reader import HfCheckpoint
from slime.utils.quantization import scheme_of
from slime.utils.quantized_folder import fp8_config, int4_config, quantize_folder
from slime.utils.tiny_model import make_tiny_model
from tests.unit.megatron.megatron_helpers import make_shard, train_args

CONFIGS = {"fp8": fp8_config((128, 128)), "int4": int4_config(32, True, ["lm_head"])}


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
def test_export_has_the_form_of_the_checkpoint(tmp_path, config):
    from slime.backends.megatron_utils.actor import MegatronActor

    plain = make_tiny_model(tmp_path / "plain", init_std=0.1)
    quantize_folder(plain, tmp_path / "small", config)
    actor = MegatronActor(train_args(tmp_path / "small", lr=1e-2), 0, 1, "127.0.0.1", 0)
    actor.init()
    stored, scheme = load_file(tmp_path / "small" / "model.safetensors"), scheme_of(config, "test")
    source = HfCheckpoint(tmp_path / "small")
    assert source.names() == load_file(plain / "model.safetensors").keys()
    for name, tensor in actor._export_plain():
        assert torch.equal(tensor, source.tensor(name))
    actor.train(0, make_shard(None))
    exported = dict(actor.export_weights())
    assert {name: (t.dtype, t.shape) for name, t in exported.items()} == {
        name: (t.dtype, t.shape) for name, t in stored.items()
    }
    for name, tensor in actor._export_plain():
        if scheme.covers(name):
            back = scheme.dequantize(name, {part: exported[part] for part in scheme.part_names(name)})
            assert (back - tensor).abs().max() < 0.08 * tensor.abs().max()
        else:
            assert torch.equal(exported[name], tensor)
    actor.save_hf(str(tmp_path / "saved"))
    saved = json.loads((tmp_path / "saved" / "config.json").read_text())
    assert saved["quantization_config"] == config and saved["dtype"] == "float32"
    assert all(
        torch.equal(t, exported[name]) for name, t in load_file(tmp_path / "saved" / "model.safetensors").items()
    )
