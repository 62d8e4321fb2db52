"""Architecture flags against, and filled from, config.json."""

from __future__ import annotations

import os

import pytest

from slime.config import UserError, parse_args

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def test_shape_is_read_from_the_model_when_no_flag_is_given(parse):
    args = parse()
    shape = {
        "num_layers": 2,
        "hidden_size": 64,
        "ffn_hidden_size": 128,
        "num_attention_heads": 4,
        "num_query_groups": 2,
        "group_query_attention": True,
        "kv_channels": 16,
        "vocab_size": 512,
        "norm_epsilon": 1e-6,
        "layernorm_epsilon": 1e-6,
        "rotary_base": 1e6,
        "normalization": "RMSNorm",
        "swiglu": True,
        "add_bias_linear": False,
        "add_qkv_bias": False,
        "qk_layernorm": True,
        "untie_embeddings_and_output_weights": False,
    }
    assert {dest: getattr(args, dest) for dest in shape} == shape
    assert any("model shape read from" in note for note in args.start_notes)
    assert args.model_arch["model_type"] == "qwen3"


def test_families_differ_in_bias_and_query_key_norm(make_model, data):
    def shape(name, **changes):
        args = parse_args(["--hf-checkpoint", make_model(name, **changes), "--prompt-data", data])
        return args.add_qkv_bias, args.qk_layernorm, args.untie_embeddings_and_output_weights, args.kv_channels

    assert shape("q2", model_type="qwen2", tie_word_embeddings=False, head_dim=None) == (True, False, True, 16)
    assert shape("l3", model_type="llama", tie_word_embeddings=None, attention_bias=False) == (False, False, True, 16)


def test_llama_scaling_is_read(make_model, data):
    scaling = LLAMA3_ROPE | {"factor": 32.0}
    model = make_model(model_type="llama", rope_scaling=scaling)
    args = parse_args(["--hf-checkpoint", model, "--prompt-data", data])
    assert (args.use_rope_scaling, args.rope_scaling_factor) == (True, 32.0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attention_bias": True}, "attention_bias is set"),
        ({"model_type": "llama", "mlp_bias": True}, "mlp_bias or"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config.quant_method 'gptq' is not supported"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"use_sliding_window": True}, "use_sliding_window is set"),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, "rope type is 'yarn'"),
        ({"rope_scaling": LLAMA3_ROPE | {"high_freq_factor": 8.0}}, "llama3 rope factors"),
    ],
)
def test_variants_that_the_trainer_lacks_are_refused(make_model, data, changes, message):
    with pytest.raises(UserError, match=message):
        parse_args(["--hf-checkpoint", make_model(**changes), "--prompt-data", data])


def test_rope_base_may_stand_in_rope_parameters(make_model, data):
    model = make_model(rope_theta=None, rope_parameters={"rope_theta": 5e6, "rope_type": "default"})
    assert parse_args(["--hf-checkpoint", model, "--prompt-data", data]).rotary_base == 5e6


def test_matching_flags_pass(parse):
    args = parse(
        *"--num-layers 2 --hidden-size 64 --ffn-hidden-size 128 --num-attention-heads 4 --group-query-attention "
        "--num-query-groups 2 --kv-channels 16 --vocab-size 512 --swiglu --disable-bias-linear --qk-layernorm "
        "--normalization RMSNorm --norm-epsilon 1e-6 --use-rotary-position-embeddings --rotary-base 1000000".split()
    )
    assert not any("model shape read" in note for note in args.start_notes)


def test_all_mismatches_come_in_one_error(parse):
    with pytest.raises(UserError) as error:
        parse(
            *"--num-layers 4 --hidden-size 128 --rotary-base 10000 --untie-embeddings-and-output-weights --add-qkv-bias".split()
        )
    for text in (
        "--num-layers is 4, num_hidden_layers in config.json is 2",
        "--hidden-size is 128, hidden_size in config.json is 64",
        "--rotary-base is 10000.0, rope_theta in config.json is 1000000.0",
        "--untie-embeddings-and-output-weights is True, not tie_word_embeddings in config.json is False",
        "--add-qkv-bias makes add_qkv_bias True, this model has False",
    ):
        assert text in str(error.value)


@pytest.mark.parametrize("flag", ["--add-qkv-bias", "--use-rope-scaling", "--normalization LayerNorm"])
def test_switches_that_the_family_does_not_have_are_refused(parse, flag):
    with pytest.raises(UserError, match="the model flags do not fit"):
        parse(*flag.split())


def test_flags_are_not_compared_without_a_trainer(parse):
    assert parse("--debug-rollout-only", "--num-layers", "4").num_layers == 4


def test_unknown_family_is_named_with_what_is_built(make_model, data):
    model = make_model(model_type="gpt_neox")
    words = ["--hf-checkpoint", model, "--prompt-data", data]
    with pytest.raises(UserError, match="model_type 'gpt_neox'.*give --num-layers"):
        parse_args(words)
    sizes = "--num-layers 2 --hidden-size 64 --num-attention-heads 4".split()
    with pytest.raises(UserError, match="model_type 'gpt_neox' is not built yet, qwen2, qwen3, qwen3_moe, llama are"):
        parse_args([*words, *sizes])
    parse_args([*words, *sizes, "--custom-model-provider-path", "my.model.provider"])


def test_differing_vocabulary_is_only_said(parse):
    assert any("--vocab-size is 500" in note for note in parse("--vocab-size", "500").start_notes)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda folder: os.remove(f"{folder}/config.json"), "holds no config.json"),
        (lambda folder: os.remove(f"{folder}/tokenizer.json"), "holds no tokenizer"),
        (lambda folder: open(f"{folder}/config.json", "w").write("{"), "config.json cannot be read"),
        (lambda folder: open(f"{folder}/config.json", "w").write("[]"), "is not a JSON object"),
        (
            lambda folder: open(f"{folder}/config.json", "w").write('{"model_type": "qwen3"}'),
            "has no 'num_attention_heads'",
        ),
    ],
)
def test_broken_model_folders_are_named(make_model, data, spoil, message):
    model = make_model()
    spoil(model)
    with pytest.raises(UserError, match=message) as error:
        parse_args(["--hf-checkpoint", model, "--prompt-data", data])
    assert model in str(error.value)


def test_hub_names_are_not_folders(data):
    with pytest.raises(UserError, match="no such folder .download the model first"):
        parse_args(["--hf-checkpoint", "Qwen/Qwen3-4B", "--prompt-data", data])
