"""Flags of low-rank adapters: names of projections, adapter folders, what cannot be combined."""

from __future__ import annotations

import json

import pytest

from slime.config.spec import UserError

ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


@pytest.fixture
def adapter(tmp_path) -> str:
    folder = tmp_path / "adapter"
    folder.mkdir()
    config = {"peft_type": "LORA", "r": 16, "lora_alpha": 8, "target_modules": ["v_proj", "q_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return str(folder)


def test_no_rank_trains_the_model(parse):
    args = parse("--lora-alpha", "16", "--lora-sync", "adapter")
    assert (args.lora_rank, args.target_modules, args.lora_sync, args.lora_base) == (0, [], "merged", None)
    assert "--lora-alpha has no effect without --lora-rank" in args.start_notes


@pytest.mark.parametrize(
    "words, expected",
    [
        ("", ALL),
        ("--target-modules all-linear", ALL),
        ("--target-modules linear_qkv linear_fc2", ["q_proj", "k_proj", "v_proj", "down_proj"]),
        ("--lora-target-modules v_proj,q_proj", ["q_proj", "v_proj"]),
    ],
)
def test_targets_go_by_hugging_face_and_megatron_names(parse, words, expected):
    args = parse("--lora-rank", "8", *words.split())
    assert args.target_modules == expected
    assert (args.lora_adapters, args.lora_base) == (["actor"], args.hf_checkpoint)


def test_folder_gives_what_is_not_said(parse, adapter):
    args = parse("--lora-adapter-path", adapter)
    assert (args.lora_rank, args.lora_alpha, args.target_modules) == (16, 8.0, ["q_proj", "v_proj"])
    assert args.lora_adapter_path == {"actor": adapter}
    args = parse("--lora-adapter-path", f"b={adapter}", "--lora-adapters", "a", "b", "--lora-sync", "adapter")
    assert args.lora_adapter_path == {"b": adapter}


@pytest.mark.parametrize(
    "words, message",
    [
        ("--lora-rank -1", "--lora-rank -1: must not be negative"),
        ("--lora-rank 8 --lora-alpha 0", "--lora-alpha 0.0: must be above 0"),
        ("--lora-rank 8 --lora-dropout 1", "--lora-dropout 1.0: must be in"),
        ("--lora-rank 8 --target-modules lm_head", "--target-modules lm_head: one of q_proj"),
        ("--lora-rank 8 --lora-adapters a b", "--lora-adapters a b needs --lora-sync adapter"),
        ("--lora-rank 8 --lora-adapters a a --lora-sync adapter", "a name stands twice"),
        ("--lora-rank 8 --lora-adapters a/b", "--lora-adapters a/b: letters"),
        ("--lora-rank 8 --lora-adapters a b --lora-sync adapter --save-hf out", "cannot be used with --save-hf"),
        ("--lora-rank 8 --freeze-params-name-list mlp", "--freeze-params-name-list cannot be used with --lora-rank"),
        ("--lora-rank 8 --lora-dropout 0.1 --share-prompts", "--share-prompts cannot be used with dropout"),
        ("--lora-rank 8 --lora-adapter-path nowhere", "--lora-adapter-path nowhere: no adapter_config.json"),
        ("--lora-adapters a b --lora-adapter-path x", "with several --lora-adapters give name=folder"),
        ("--lora-adapters a --lora-adapter-path c=x", "--lora-adapters are a, each at most once"),
    ],
)
def test_mistakes_are_named(parse, words, message):
    with pytest.raises(UserError, match=message.replace("[", r"\[")):
        parse(*words.split())


@pytest.mark.parametrize(
    "words, message",
    [
        ("--lora-rank 4", "its rank is 16, --lora-rank is 4"),
        ("--lora-alpha 32", "it is scaled by 0.5, --lora-alpha 32 / --lora-rank 16 is 2"),
    ],
)
def test_a_folder_of_another_rank_or_scaling_is_refused(parse, adapter, words, message):
    with pytest.raises(UserError, match=f"--lora-adapter-path {adapter}: {message}"):
        parse("--lora-adapter-path", adapter, *words.split())


def test_a_folder_that_holds_no_lora_is_named(parse, adapter, tmp_path):
    (tmp_path / "adapter" / "adapter_config.json").write_text('{"peft_type": "IA3", "target_modules": ["q_proj"]}')
    with pytest.raises(UserError, match=f"--lora-adapter-path {adapter}: adapter_config.json is not .* KeyError: 'r'"):
        parse("--lora-adapter-path", adapter)


def test_the_reference_of_adapters_is_their_base(parse, make_model):
    start, other = make_model("start"), make_model("other")
    words = ("--lora-rank", "8", "--use-kl-loss", "--load", start)
    assert parse(*words).lora_base == start
    with pytest.raises(
        UserError, match=f"--ref-load {other}: with --lora-rank the reference is the base model, {start}"
    ):
        parse(*words, "--ref-load", other)
