"""Qwen3-MoE in Megatron is transformers' Qwen3-MoE: logits, weights there and back, gradients; routers as flags say."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from slime.utils.tiny_model import Experts, make_tiny_model
from tests.unit.megatron.megatron_helpers import random_tokens, train_args
from tests.unit.megatron.test_hf_parity import LENGTHS, packed_logits

SHAPES = {
    "all layers": dict(experts=Experts(count=6, per_token=3, width=24)),
    "first layer dense": dict(experts=Experts(dense_layers=(0,)), layers=3, tied=False),
}


def edit_config(folder, **values) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def built(folder, **flags):
    """(args, our model with the folder's weights)."""
    from slime.backends.megatron_utils.hf_to_megatron import load_hf_weights
    from slime.backends.megatron_utils.model_provider import build_model

    args = train_args(folder, **flags)
    model = build_model(args)
    load_hf_weights(model, folder)
    return args, model


@pytest.fixture(scope="module", params=SHAPES)
def folder(request, tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("model"), arch="qwen3_moe", init_std=0.2, **SHAPES[request.param])


def test_packed_logits_and_gradients_equal_transformers(folder):
    from transformers import AutoModelForCausalLM

    args, model = built(folder)
    theirs = AutoModelForCausalLM.from_pretrained(folder, experts_implementation="eager")
    sequences = random_tokens(LENGTHS)
    expected = torch.cat([theirs(s[None]).logits[0] for s in sequences])
    actual = packed_logits(model, sequences, with_grad=True)[:, : args.vocab_size]
    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=0)
    weights = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1))
    (expected * weights).sum().backward()
    (actual * weights).sum().backward()
    last = f"layers.{args.num_layers - 1}"
    mlp, hf = model.get_submodule(f"decoder.{last}.mlp"), theirs.get_submodule(f"model.{last}.mlp")
    torch.testing.assert_close(mlp.router.weight.grad, hf.gate.weight.grad, atol=1e-4, rtol=1e-4)
    for i, expert in enumerate(mlp.experts.local_experts):
        torch.testing.assert_close(expert.linear_fc1.weight.grad, hf.experts.gate_up_proj.grad[i], atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(expert.linear_fc2.weight.grad, hf.experts.down_proj.grad[i], atol=1e-4, rtol=1e-4)


def test_unnormalised_router_weights_equal_transformers(tmp_path):
    from transformers import AutoModelForCausalLM

    folder = make_tiny_model(tmp_path, arch="qwen3_moe", init_std=0.2)
    edit_config(folder, norm_topk_prob=False)
    args, model = built(folder)
    assert args.moe_router_pre_softmax
    theirs = AutoModelForCausalLM.from_pretrained(folder)
    (sequence,) = random_tokens([33], seed=1)
    with torch.no_grad():
        expected = theirs(sequence[None]).logits[0]
    torch.testing.assert_close(packed_logits(model, [sequence])[:, : args.vocab_size], expected, atol=1e-5, rtol=0)


def test_export_gives_back_the_same_bits(folder):
    from slime.backends.megatron_utils.megatron_to_hf import export_hf_weights

    args, model = built(folder)
    source, exported = load_file(folder / "model.safetensors"), dict(export_hf_weights([model], args))
    assert exported.keys() == source.keys()
    assert all(torch.equal(exported[name], source[name]) for name in source)


def test_what_transformers_writes_can_be_read(folder, tmp_path):
    from transformers import AutoModelForCausalLM

    AutoModelForCausalLM.from_pretrained(folder).save_pretrained(tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(folder / name, tmp_path / name)
    sequences = random_tokens([9, 14])
    args, ours = built(folder)
    _, again = built(tmp_path)
    assert torch.equal(packed_logits(ours, sequences), packed_logits(again, sequences))


@pytest.mark.parametrize("name", ["mlp.gate.weight", "mlp.experts.3.up_proj.weight"])
def test_missing_and_superfluous_tensors_are_named(tmp_path, name):
    good = make_tiny_model(tmp_path / "good", arch="qwen3_moe")
    bad = tmp_path / "bad"
    shutil.copytree(good, bad)
    tensors = load_file(good / "model.safetensors")
    lost = tensors.pop(f"model.layers.1.{name}")
    save_file(tensors, bad / "model.safetensors")
    with pytest.raises(ValueError, match=f"layers.1.{name}.*missing"):
        built(bad)
    tensors[f"model.layers.1.{name}"] = lost
    tensors["model.layers.1.mlp.experts.4.up_proj.weight"] = torch.zeros(2)
    save_file(tensors, bad / "model.safetensors")
    with pytest.raises(ValueError, match=r"do not belong.*experts\.4"):
        built(bad)
