"""The commands that the project's documents show: they parse, and what is not built is refused with its reason."""

from __future__ import annotations

import pytest

from slime.config import UserError, parse_args
from slime.config.parse import parse_raw

MODEL_ARGS = (
    "--num-layers 36 --hidden-size 2560 --ffn-hidden-size 9728 --num-attention-heads 32 --group-query-attention "
    "--num-query-groups 8 --kv-channels 128 --vocab-size 151936 --swiglu --disable-bias-linear --qk-layernorm "
    "--normalization RMSNorm --norm-epsilon 1e-6 --use-rotary-position-embeddings --rotary-base 1000000"
).split()
SHAPE = {
    "num_hidden_layers": 36,
    "hidden_size": 2560,
    "intermediate_size": 9728,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000,
}
QUICK_START = """--actor-num-nodes 1 --actor-num-gpus-per-node 4 --rollout-num-gpus 4 --advantage-estimator grpo --use-kl-loss
    --kl-loss-coef 0.001 --rollout-batch-size 32 --n-samples-per-prompt 8 --global-batch-size 256 --num-rollout 3000"""
STANDARD = """--actor-num-nodes 1 --actor-num-gpus-per-node 8 --rollout-num-gpus 8 --advantage-estimator grpo --use-kl-loss
    --kl-loss-coef 0.001 --input-key prompt --label-key label --apply-chat-template --rollout-batch-size 32
    --n-samples-per-prompt 8 --global-batch-size 256 --num-rollout 3000 --save-interval 100 --eval-interval 50"""
ASYNC = """--actor-num-nodes 1 --actor-num-gpus-per-node 8 --rollout-num-gpus 8 --advantage-estimator grpo
    --async-buffer-size 4 --update-weights-interval 2"""


@pytest.fixture
def run(make_model, data):
    """Parse a documented command with the model and data arguments of this machine."""
    model = make_model("qwen3-4B", **SHAPE)

    def parse_command(command: str, *more: str):
        return parse_args([*command.split(), *more, "--prompt-data", data, *MODEL_ARGS, "--hf-checkpoint", model])

    return parse_command


def test_quick_start(run):
    args = run(QUICK_START)
    assert (args.world_size, args.rollout_num_engines, args.global_batch_size) == (4, 4, 256)
    assert (args.num_steps_per_rollout, args.num_rollout) == (1, 3000)
    assert args.ref_load == args.hf_checkpoint
    assert args.num_layers == 36


def test_standard_grpo(run, tmp_path):
    args = run(STANDARD)
    assert args.save == args.run_dir + "/checkpoints"
    assert args.run_dir.startswith(str(tmp_path / "outputs"))
    assert args.eval_interval is None
    assert args.use_tensorboard is True
    assert (args.input_key, args.label_key, args.apply_chat_template) == ("prompt", "label", True)


def test_async_command_takes_defaults_for_batch_and_rounds(run):
    args = run(ASYNC)
    assert (args.rollout_batch_size, args.num_rollout, args.num_epoch) == (32, None, 1)
    assert (args.async_buffer_size, args.update_weights_interval) == (4, 2)


def test_multi_turn_agent(run, tmp_path):
    (tmp_path / "custom_generate.py").write_text("async def custom_generate(args, samples, evaluation=False): ...\n")
    args = run("--custom-generate-function-path custom_generate.py --max-turns 5")
    assert args.custom_generate_function_path == str(tmp_path / "custom_generate.py")
    assert args.max_turns == 5


def test_custom_reward_file(run, tmp_path):
    (tmp_path / "custom_rm.py").write_text("class CustomRewardModel: ...\n")
    assert run("--custom-rm-path custom_rm.py").custom_rm_path == str(tmp_path / "custom_rm.py")


@pytest.mark.parametrize(
    "flags",
    [
        "--sglang-context-length 8192 --sglang-log-level INFO --sglang-mem-fraction-static 0.4",
        "--rollout-batch-size 16",
        "--colocate --sglang-mem-fraction-static 0.4",
        "--update-weights-interval 5",
        "--recompute-activations --micro-batch-size 1 --sequence-parallel",
        "--advantage-estimator gspo",
        "--advantage-estimator reinforce_plus_plus",
    ],
)
def test_other_documented_flags_run(run, flags):
    run(flags)


def test_evaluation_sets_of_the_documents(run, data):
    args = run(
        "--eval-prompt-data aime", data, "--eval-prompt-data", "gsm8k", data, "--n-samples-per-eval-prompt", "16"
    )
    assert [(item.name, item.n_samples_per_eval_prompt) for item in args.eval_datasets] == [("aime", 16), ("gsm8k", 16)]


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        ("--use-fault-tolerance", "--use-fault-tolerance: restarting dead engines"),
    ],
)
def test_documented_flags_that_are_not_built_parse_and_are_refused_with_the_reason(run, flags, reason):
    parse_raw(flags.split())
    with pytest.raises(UserError, match=reason):
        run(flags)


def test_sft_command(run):
    args = run(
        "--rollout-function-path slime.rollout.sft_rollout.generate_rollout --loss-type sft_loss "
        "--calculate-per-token-loss --disable-compute-advantages-and-returns --num-epoch 3 --debug-train-only "
        "--rollout-batch-size 16 --global-batch-size 16"
    )
    assert (args.n_samples_per_prompt, args.num_epoch, args.rollout_num_engines) == (1, 3, 0)
    assert args.compute_advantages_and_returns is False


def test_usual_optimizer_and_performance_groups(run):
    args = run(
        "--optimizer adam --lr 1e-6 --lr-decay-style constant --weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.98 "
        "--eps-clip 0.2 --eps-clip-high 0.28 --use-kl-loss --kl-loss-coef 0.0 --kl-loss-type low_var_kl "
        "--attention-dropout 0.0 --hidden-dropout 0.0 --accumulate-allreduce-grads-in-fp32 "
        "--attention-softmax-in-fp32 --attention-backend flash --recompute-granularity full --recompute-method uniform "
        "--recompute-num-layers 1 --use-dynamic-batch-size --max-tokens-per-gpu 9216 --entropy-coef 0.0 "
        "--tensor-model-parallel-size 1 --expert-tensor-parallel-size 1 --rollout-shuffle --num-rollout 100 "
        "--rollout-max-response-len 8192 --rollout-temperature 0.8 --rm-type deepscaler --balance-data"
    )
    assert (args.adam_beta2, args.eps_clip_high, args.recompute_num_layers) == (0.98, 0.28, 1)
