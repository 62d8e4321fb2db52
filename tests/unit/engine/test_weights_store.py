"""Weights by Hugging Face name: loading, in-place updates, all or nothing."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from slime.engine.model_config import load_model_config
from slime.engine.weights import Weights
from slime.utils.checksum import tensor_checksum
from slime.utils.tiny_model import make_tiny_model

CPU = torch.device("cpu")


@pytest.fixture
def folder(tmp_path):
    return make_tiny_model(tmp_path / "model", arch="qwen2", init_std=0.1)


def empty_weights(folder) -> Weights:
    return Weights(load_model_config(folder), torch.float32, CPU)


def test_names_and_views_are_those_of_the_checkpoint(folder):
    weights = empty_weights(folder)
    weights.load(folder)
    tensors = load_file(str(folder / "model.safetensors"))
    assert set(weights.names) == set(tensors)
    for name, tensor in tensors.items():
        assert torch.equal(weights.view(name), tensor), name
    assert weights.checksums() == {name: tensor_checksum(tensor) for name, tensor in tensors.items()}


def test_sharded_checkpoint_loads(folder, tmp_path):
    tensors = load_file(str(folder / "model.safetensors"))
    sharded = tmp_path / "sharded"
    sharded.mkdir()
    (sharded / "config.json").write_text((folder / "config.json").read_text())
    names = sorted(tensors)
    index = {}
    for number, part in enumerate((names[::2], names[1::2])):
        file = f"model-{number:05d}-of-00002.safetensors"
        save_file({name: tensors[name] for name in part}, str(sharded / file))
        index.update(dict.fromkeys(part, file))
    (sharded / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    weights = empty_weights(sharded)
    weights.load(sharded)
    assert weights.checksums() == {name: tensor_checksum(tensor) for name, tensor in tensors.items()}


def test_assign_writes_into_the_fused_storage(folder):
    weights = empty_weights(folder)
    weights.load(folder)
    fused = weights.stored["0.qkv"]
    name = "model.layers.0.self_attn.k_proj.weight"
    weights.assign({name: torch.full((32, 64), 3.0)})
    assert weights.stored["0.qkv"] is fused
    assert torch.equal(fused[64:96], torch.full((32, 64), 3.0))
    assert not torch.equal(fused[96:], torch.full((32, 64), 3.0))


@pytest.mark.parametrize("bad", [{"model.norm.weight": torch.ones(3)}, {"model.what.weight": torch.ones(64)}])
def test_assign_is_all_or_nothing(folder, bad):
    weights = empty_weights(folder)
    weights.load(folder)
    before = weights.checksums()
    with pytest.raises(ValueError, match=next(iter(bad))):
        weights.assign({"model.embed_tokens.weight": torch.zeros(260, 64), **bad})
    assert weights.checksums() == before


def test_tied_head_is_accepted_as_the_embedding(folder):
    weights = empty_weights(folder)
    weights.assign({"lm_head.weight": torch.full((260, 64), 2.0)})
    assert torch.equal(weights.view("model.embed_tokens.weight"), torch.full((260, 64), 2.0))


@pytest.mark.parametrize("fault", ["missing", "shape"])
def test_load_of_a_checkpoint_that_does_not_fit_changes_nothing(folder, tmp_path, fault):
    weights = empty_weights(folder)
    weights.load(folder)
    before = weights.checksums()
    tensors = load_file(str(folder / "model.safetensors"))
    tensors["model.embed_tokens.weight"] += 1
    if fault == "missing":
        del tensors["model.norm.weight"]
    else:
        tensors["model.norm.weight"] = torch.ones(5)
    broken = tmp_path / "broken"
    broken.mkdir()
    save_file(tensors, str(broken / "model.safetensors"))
    with pytest.raises(ValueError, match="model.norm.weight"):
        weights.load(broken)
    assert weights.checksums() == before


def test_computing_in_another_dtype_follows_every_change_and_leaves_checksums(folder):
    weights = Weights(load_model_config(folder), torch.bfloat16, CPU, torch.float32)
    weights.load(folder)
    rounded = load_file(str(folder / "model.safetensors"))["model.norm.weight"].bfloat16()
    assert weights.checksums()["model.norm.weight"] == tensor_checksum(rounded)
    assert weights.computed["norm"].dtype == torch.float32
    assert torch.equal(weights.computed["norm"], rounded.float())
    for change in (
        lambda: weights.assign({"model.norm.weight": torch.full((64,), 1 / 3)}),
        weights.scramble,
        lambda: weights.load(folder),
        lambda: (weights.release(), weights.restore()),
    ):
        before = weights.computed
        change()
        assert weights.computed is not before
        for key, tensor in weights.stored.items():
            assert torch.equal(weights.computed[key], tensor.float()), key
    assert empty_weights(folder).computed is not None
    same = empty_weights(folder)
    assert same.computed is same.stored
