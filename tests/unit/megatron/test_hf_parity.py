"""The Megatron model is the Hugging Face model: same logits, same weights there and back, clear refusals."""

import json
import os
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from slime.utils.tiny_model import make_tiny_model
from tests.unit.megatron.megatron_helpers import random_tokens, train_args

LENGTHS = [7, 48, 23, 1, 9, 12]


@pytest.fixture(scope="module", params=[(a, t) for a in ("qwen3", "qwen2", "llama") for t in (True, False)], ids=str)
def pair(request, tmp_path_factory):
    """(folder, args, our model, transformers' model), random weights large enough to tell models apart."""
    from transformers import AutoModelForCausalLM

    from slime.backends.megatron_utils.hf_to_megatron import load_hf_weights
    from slime.backends.megatron_utils.model_provider import build_model

    arch, tied = request.param
    folder = make_tiny_model(tmp_path_factory.mktemp("model"), arch=arch, tied=tied, init_std=0.1)
    args = train_args(folder, make_vocab_size_divisible_by=128)
    model = build_model(args)
    load_hf_weights(model, folder)
    return folder, args, model, AutoModelForCausalLM.from_pretrained(folder)


def packed_logits(model, sequences, rows=None, with_grad=False):
    from slime.backends.megatron_utils.data import pack
    from slime.backends.megatron_utils.model_provider import forward_logits

    batch = pack(sequences, [0] * len(sequences), range(len(sequences)), 1, torch.device("cpu"))
    with torch.set_grad_enabled(with_grad):
        return forward_logits(model, batch.tokens, batch.positions, batch.packed, rows)[0]


def test_packed_logits_equal_transformers(pair):
    _, args, model, hf = pair
    sequences = random_tokens(LENGTHS)
    ours = packed_logits(model, sequences)[:, : args.vocab_size]
    with torch.no_grad():
        theirs = torch.cat([hf(s[None]).logits[0] for s in sequences])
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=0)


def test_single_sequence_logits_equal_transformers(pair):
    _, args, model, hf = pair
    (sequence,) = random_tokens([33], seed=1)
    with torch.no_grad():
        theirs = hf(sequence[None]).logits[0]
    torch.testing.assert_close(packed_logits(model, [sequence])[:, : args.vocab_size], theirs, atol=1e-5, rtol=0)


def test_chosen_rows_are_those_of_the_full_logits(pair):
    _, _, model, _ = pair
    sequences, rows = random_tokens(LENGTHS), torch.tensor([3, 60, 70, 71])
    torch.testing.assert_close(
        packed_logits(model, sequences, rows), packed_logits(model, sequences)[rows], atol=1e-5, rtol=0
    )


def test_export_gives_back_the_same_bits(pair):
    from slime.backends.megatron_utils.megatron_to_hf import export_hf_weights

    folder, args, model, _ = pair
    source, exported = load_file(folder / "model.safetensors"), dict(export_hf_weights([model], args))
    assert exported.keys() == source.keys()
    assert all(torch.equal(exported[name], source[name]) for name in source)


def test_save_hf_round_trip_is_exact_also_in_shards(pair, tmp_path):
    from slime.backends.megatron_utils.hf_to_megatron.reader import HfCheckpoint
    from slime.backends.megatron_utils.megatron_to_hf import export_hf_weights
    from slime.backends.megatron_utils.megatron_to_hf.writer import save_hf

    folder, args, model, _ = pair
    source = load_file(folder / "model.safetensors")
    for limit, single in ((2**30, True), (60_000, False)):
        out = tmp_path / str(limit)
        save_hf(export_hf_weights([model], args), args, out, max_shard_bytes=limit)
        assert (out / "model.safetensors").exists() is single
        assert (out / "tokenizer.json").exists() and (out / "config.json").exists()
        plain = (out / "config.json").stat().st_mode  # what the umask gives any new file
        assert all(file.stat().st_mode == plain for file in out.glob("*.safetensors"))
        saved = HfCheckpoint(out)
        assert saved.names() == source.keys()
        assert all(torch.equal(saved.tensor(name), source[name]) for name in source)
    assert [p.name for p in tmp_path.iterdir() if p.name.startswith(".")] == []


def test_interrupted_save_hf_is_never_seen_and_the_next_one_replaces_what_was_there(pair, tmp_path):
    from slime.backends.megatron_utils.megatron_to_hf import export_hf_weights
    from slime.backends.megatron_utils.megatron_to_hf.writer import save_hf

    folder, args, model, _ = pair

    def interrupted():
        yield from list(export_hf_weights([model], args))[:5]
        raise KeyboardInterrupt

    out = tmp_path / "weight_v000003"
    with pytest.raises(KeyboardInterrupt):
        save_hf(interrupted(), args, out, max_shard_bytes=60_000)
    assert not out.exists()
    out.mkdir()
    (out / "model-00009-of-00009.safetensors").write_text("of an earlier run")
    with pytest.raises(KeyboardInterrupt):
        save_hf(interrupted(), args, out, max_shard_bytes=60_000)
    assert [file.name for file in out.iterdir()] == ["model-00009-of-00009.safetensors"]
    save_hf(export_hf_weights([model], args), args, out)
    assert load_file(out / "model.safetensors").keys() == load_file(folder / "model.safetensors").keys()
    assert not list(out.glob("model-0*")) and os.listdir(tmp_path) == ["weight_v000003"]


def test_save_hf_refuses_the_source_folder(pair):
    from slime.backends.megatron_utils.megatron_to_hf.writer import save_hf

    folder, args, _, _ = pair
    with pytest.raises(ValueError, match="would overwrite --hf-checkpoint"):
        save_hf([], args, folder)


@pytest.fixture
def broken(tmp_path):
    """A copy of a checkpoint, its tensors to change, and a function that loads the copy."""
    from slime.backends.megatron_utils.hf_to_megatron import load_hf_weights
    from slime.backends.megatron_utils.model_provider import build_model

    folder = make_tiny_model(tmp_path / "good")
    model = build_model(train_args(folder))
    copy = tmp_path / "bad"
    shutil.copytree(folder, copy)
    tensors = load_file(folder / "model.safetensors")

    def load():
        save_file(tensors, copy / "model.safetensors")
        load_hf_weights(model, copy)

    return tensors, load, copy


def test_missing_tensor_is_named(broken):
    tensors, load, _ = broken
    del tensors["model.layers.1.mlp.up_proj.weight"]
    with pytest.raises(ValueError, match=r"model\.layers\.1\.mlp\.up_proj\.weight.*missing"):
        load()


def test_unexpected_tensor_is_named(broken):
    tensors, load, _ = broken
    tensors["model.layers.1.mlp.extra.weight"] = torch.zeros(2)
    with pytest.raises(ValueError, match=r"do not belong.*mlp\.extra"):
        load()


def test_shape_mismatch_names_tensor_and_shapes(broken):
    tensors, load, _ = broken
    tensors["model.layers.0.mlp.down_proj.weight"] = torch.zeros(64, 100)
    with pytest.raises(ValueError, match=r"down_proj.*\(64, 100\).*\(64, 128\)"):
        load()


def test_pickled_weights_are_refused(broken):
    from slime.backends.megatron_utils.hf_to_megatron.reader import HfCheckpoint

    _, _, copy = broken
    (copy / "model.safetensors").rename(copy / "pytorch_model.bin")
    with pytest.raises(ValueError, match="pytorch_model.bin is pickled"):
        HfCheckpoint(copy)


def test_llama3_rope_scaling_equals_transformers(tmp_path):
    from transformers import AutoModelForCausalLM

    from slime.backends.megatron_utils.hf_to_megatron import load_hf_weights
    from slime.backends.megatron_utils.model_provider import build_model

    folder = make_tiny_model(tmp_path, arch="llama", init_std=0.1, max_positions=16384)
    config = json.loads((folder / "config.json").read_text())
    scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    scaling["original_max_position_embeddings"] = 8192
    config["rope_theta"] = 500000.0
    config["rope_parameters"] = {**scaling, "rope_theta": 500000.0}
    (folder / "config.json").write_text(json.dumps(config))
    args = train_args(folder)
    model = build_model(args)
    load_hf_weights(model, folder)
    assert args.use_rope_scaling
    (sequence,) = random_tokens([300])
    with torch.no_grad():
        theirs = AutoModelForCausalLM.from_pretrained(folder)(sequence[None]).logits[0]
    ours = packed_logits(model, [sequence])
    torch.testing.assert_close(ours, theirs, atol=2e-5, rtol=0)
    args.use_rope_scaling = False
    plain = build_model(args)
    load_hf_weights(plain, folder)
    assert (packed_logits(plain, [sequence]) - theirs).abs().max() > 1e-3


@pytest.mark.parametrize(
    "change, message",
    [
        ({"model_type": "gpt2"}, "model_type 'gpt2'.*known: .*llama"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "rope type 'yarn'"),
        ({"mlp_bias": True}, "mlp_bias"),
    ],
)
def test_configs_outside_the_converters_are_refused(tmp_path, change, message):
    from slime.backends.megatron_utils.architecture import architecture_args

    config = json.loads((make_tiny_model(tmp_path, arch="llama") / "config.json").read_text())
    with pytest.raises(ValueError, match=message):
        architecture_args({**config, **change})
