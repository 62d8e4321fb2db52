"""Flags of a mixture of experts: read from config.json, compared with it, refused where they cannot hold."""

from __future__ import annotations

import itertools
import subprocess
from pathlib import Path

import pytest

from slime.config import UserError, parse_args

REPO = Path(__file__).resolve().parents[3]
EXPERTS = {
    "model_type": "qwen3_moe",
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "norm_topk_prob": True,
}


@pytest.fixture
def parse_experts(make_model, data):
    """Parse flags for a model with experts; `changes` edit its config.json."""

    numbers = itertools.count()

    def run(*words: str, **changes):
        model = make_model(f"experts-{next(numbers)}", **{**EXPERTS, **changes})
        return parse_args(["--hf-checkpoint", model, "--prompt-data", data, *words])

    return run


def test_shape_of_the_experts_is_read_from_the_model(parse_experts):
    args = parse_experts()
    shape = {
        "num_experts": 8,
        "moe_router_topk": 2,
        "moe_ffn_hidden_size": 32,
        "moe_layer_freq": [1, 1],
        "moe_router_score_function": "softmax",
        "moe_router_pre_softmax": False,
        "moe_router_dtype": "fp32",
        "qk_layernorm": True,
    }
    assert {dest: getattr(args, dest) for dest in shape} == shape


def test_dense_layers_and_shares_of_all_experts_are_read(parse_experts):
    args = parse_experts(mlp_only_layers=[0], norm_topk_prob=False, num_experts=None, num_local_experts=4)
    assert (args.moe_layer_freq, args.moe_router_pre_softmax, args.num_experts) == ([0, 1], True, 4)


def test_matching_flags_pass_whatever_the_unused_width_is(parse_experts):
    parse_experts(
        *"--num-experts 8 --moe-router-topk 2 --moe-ffn-hidden-size 32 --moe-layer-freq [1]*2 --ffn-hidden-size 7 "
        "--moe-router-score-function softmax --moe-router-load-balancing-type none --moe-aux-loss-coeff 0".split()
    )


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--num-experts 4", "--num-experts is 4, num_experts in config.json is 8"),
        ("--moe-router-topk 3", "--moe-router-topk is 3"),
        ("--moe-layer-freq [0,1]", r"--moe-layer-freq is \[0, 1\]"),
        ("--moe-router-pre-softmax", "moe_router_pre_softmax True, this model has False"),
        ("--moe-router-score-function sigmoid", "moe_router_score_function sigmoid"),
        ("--moe-router-enable-expert-bias", "routers that score with a sigmoid"),
        ("--moe-aux-loss-coeff 0.1 --moe-router-load-balancing-type none", "needs a --moe-router-load-balancing-type"),
        ("--moe-shared-expert-intermediate-size 8", "no built model has shared experts"),
        ("--moe-expert-capacity-factor 1.0", "otherwise than the engine"),
        ("--moe-enable-routing-replay", "--use-rollout-routing-replay"),
        ("--share-prompts", "a mixture of experts"),
        ("--skip-zero-advantage", "a mixture of experts"),
    ],
)
def test_what_cannot_hold_is_refused_with_the_reason(parse_experts, flags, message):
    with pytest.raises(UserError, match=message):
        parse_experts(*flags.split())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_experts_per_tok": 9}, "num_experts_per_tok is 9 of 8"),
        ({"num_experts_per_tok": 1}, "router would have no gradient"),
        ({"mlp_only_layers": [2]}, "beyond the last layer"),
    ],
)
def test_models_that_the_trainer_lacks_are_refused(parse_experts, changes, message):
    with pytest.raises(UserError, match=message):
        parse_experts(**changes)


def test_a_dense_model_takes_no_experts(parse):
    with pytest.raises(UserError, match="--num-experts is 4, this model has none"):
        parse("--num-experts", "4")
    with pytest.raises(UserError, match="--moe-z-loss-coeff: the model has no experts"):
        parse("--moe-z-loss-coeff", "0.1")


def test_kernels_are_put_back_without_a_gpu(parse_experts):
    args = parse_experts(*"--moe-grouped-gemm --moe-permute-fusion --moe-token-drop-policy position".split())
    assert not args.moe_grouped_gemm and not args.moe_permute_fusion
    assert any("--moe-grouped-gemm has no effect" in note for note in args.start_notes)


@pytest.mark.parametrize("name", ["qwen3-30B-A3B", "qwen3-235B-A22B"])
def test_model_scripts_fit_their_models(parse_experts, name):
    words = subprocess.run(
        ["bash", "-euc", f'source "{REPO}/scripts/models/{name}.sh"; printf "%s\\n" "${{MODEL_ARGS[@]}}"'],
        capture_output=True, text=True, timeout=120, check=True,
    ).stdout.splitlines()  # fmt: skip
    layers, hidden, heads, width = (48, 2048, 32, 768) if "30B" in name else (94, 4096, 64, 1536)
    args = parse_experts(
        *words, num_hidden_layers=layers, hidden_size=hidden, num_attention_heads=heads, num_key_value_heads=4,
        head_dim=128, num_experts=128, num_experts_per_tok=8, moe_intermediate_size=width, tie_word_embeddings=False,
        intermediate_size=3 * hidden, vocab_size=151936, rms_norm_eps=1e-6, rope_theta=1000000,
    )  # fmt: skip
    assert args.moe_layer_freq == [1] * layers


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--lora-adapters a b --lora-sync adapter", "--lora-adapters a b with .*only one adapter can train experts"),
        (
            "--actor-num-gpus-per-node 2 --expert-tensor-parallel-size 2",
            "--expert-tensor-parallel-size 2 with .*adapters of experts need whole experts",
        ),
    ],
)
def test_adapters_that_cannot_train_experts_may_leave_them_out(parse_experts, flags, message):
    with pytest.raises(UserError, match=message):
        parse_experts("--lora-rank", "8", *flags.split())
    parse_experts("--lora-rank", "8", *flags.split(), "--target-modules", "q_proj", "v_proj")


def test_replay_of_the_engine_s_experts_implies_replay(parse_experts):
    args = parse_experts("--use-rollout-routing-replay")
    assert args.use_routing_replay
    assert not parse_experts("--use-routing-replay").use_rollout_routing_replay


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--use-routing-replay --use-rollout-logprobs", "--use-rollout-routing-replay takes the engine's"),
        ("--use-routing-replay --loss-type sft_loss", "no pass before training records experts"),
    ],
)
def test_replay_without_a_source_is_refused(parse_experts, flags, message):
    with pytest.raises(UserError, match=message):
        parse_experts(*flags.split())


@pytest.mark.parametrize("flag", ["--use-routing-replay", "--use-rollout-routing-replay"])
def test_a_dense_model_replays_no_experts(parse, flag):
    with pytest.raises(UserError, match=f"^{flag}: the model has no experts$"):
        parse(flag)
