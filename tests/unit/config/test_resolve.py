"""Derived values: what is assumed, and that it is said at start."""

from __future__ import annotations

import os
import pickle
import sys
from types import SimpleNamespace

import pytest

from slime.config import UserError
from slime.config import resolve as resolve_module
from slime.config.validate import fit_to_async_loop


def said(args, text: str) -> bool:
    return any(text in note for note in args.start_notes)


def test_defaults_of_a_bare_command_are_complete_and_said(parse):
    args = parse()
    assert (args.rollout_batch_size, args.n_samples_per_prompt, args.global_batch_size) == (32, 8, 256)
    assert (args.num_steps_per_rollout, args.num_rollout, args.num_epoch) == (1, None, 1)
    assert (args.world_size, args.data_parallel_size, args.rollout_num_gpus, args.rollout_num_engines) == (1, 1, 1, 1)
    assert args.eval_datasets == [] and args.use_critic is False and args.rollout_external is False
    for text in (
        "--rollout-batch-size is 32",
        "--n-samples-per-prompt is 8",
        "one epoch",
        "--global-batch-size is 256",
    ):
        assert said(args, text), text


@pytest.mark.parametrize("missing", ["rollout_batch_size", "one_epoch", "rollout_num_gpus"])
def test_strict_args_assumes_nothing(parse, missing):
    words = {
        "rollout_batch_size": "--rollout-num-gpus 8 --num-rollout 1",
        "one_epoch": "--rollout-num-gpus 8 --rollout-batch-size 4 --n-samples-per-prompt 2",
        "rollout_num_gpus": "--rollout-batch-size 4 --n-samples-per-prompt 2 --num-rollout 1",
    }[missing]
    with pytest.raises(UserError, match="strict-args"):
        parse("--strict-args", *words.split())


def test_args_can_be_sent_to_other_processes(parse, data):
    args = parse("--eval-prompt-data", "quiz", data)
    assert pickle.loads(pickle.dumps(args)).eval_datasets == args.eval_datasets


@pytest.mark.parametrize(
    "family, expected", [("qwen3", "qwen3"), ("qwen2", "qwen"), ("llama", "auto"), ("glm4", "auto")]
)
def test_masks_of_sft_fit_the_model_family(family, expected):
    from slime.config.resolve import Run, loss_mask_type

    args = SimpleNamespace(
        loss_type="sft_loss", strict_args=False, loss_mask_type="qwen", model_arch={"model_type": family}
    )
    run = Run(args, set(), [])
    loss_mask_type(run)
    assert args.loss_mask_type == expected and bool(run.notes) == (expected != "qwen")
    for given, changes in (
        ({"loss_mask_type"}, {}),
        (set(), {"loss_type": "policy_loss"}),
        (set(), {"strict_args": True}),
    ):
        other = SimpleNamespace(**{**vars(args), "loss_mask_type": "qwen", **changes})
        loss_mask_type(Run(other, given, []))
        assert other.loss_mask_type == "qwen"


class TestBatchRule:
    def test_steps_alone_give_the_batch(self, parse):
        args = parse(*"--rollout-batch-size 32 --n-samples-per-prompt 8 --num-steps-per-rollout 4".split())
        assert args.global_batch_size == 64

    def test_batch_alone_gives_the_steps(self, parse):
        args = parse(*"--rollout-batch-size 32 --n-samples-per-prompt 8 --global-batch-size 64".split())
        assert args.num_steps_per_rollout == 4

    def test_disagreement_shows_both_products(self, parse):
        with pytest.raises(
            UserError,
            match=r"32 x --n-samples-per-prompt 8 = 256 rollouts, but --global-batch-size 64 x "
            r"--num-steps-per-rollout 2 = 128",
        ):
            parse(
                *"--rollout-batch-size 32 --n-samples-per-prompt 8 --global-batch-size 64 --num-steps-per-rollout 2".split()
            )

    def test_steps_must_divide_the_rollouts(self, parse):
        with pytest.raises(UserError, match="256 rollouts cannot be split into --num-steps-per-rollout 3"):
            parse(*"--rollout-batch-size 32 --n-samples-per-prompt 8 --num-steps-per-rollout 3".split())

    def test_batch_larger_than_a_round_is_refused(self, parse):
        with pytest.raises(UserError, match="= 8 rollouts, fewer than --global-batch-size 16"):
            parse(*"--rollout-batch-size 2 --n-samples-per-prompt 4 --global-batch-size 16".split())

    def test_rest_of_a_round_is_said(self, parse):
        args = parse(*"--rollout-batch-size 5 --n-samples-per-prompt 2 --global-batch-size 4".split())
        assert args.num_steps_per_rollout == 2
        assert said(args, "the last 2 of each round are not trained")

    def test_iterations_follow_rounds_and_steps(self, parse):
        args = parse(
            *"--rollout-batch-size 4 --n-samples-per-prompt 2 --num-steps-per-rollout 2 --num-rollout 10".split()
        )
        assert (args.train_iters, args.lr_decay_iters) == (20, 20)


class TestSamplesPerPrompt:
    @pytest.mark.parametrize("estimator", ["grpo", "gspo", "cispo", "rloo", "dr_grpo", "reinforce_plus_plus_baseline"])
    def test_explicit_one_with_a_group_estimator_is_an_error(self, parse, estimator):
        with pytest.raises(UserError, match=f"--n-samples-per-prompt 1 with --advantage-estimator {estimator}"):
            parse("--advantage-estimator", estimator, "--n-samples-per-prompt", "1")

    @pytest.mark.parametrize(
        "words",
        [
            "--advantage-estimator reinforce_plus_plus",
            "--disable-rewards-normalization",
            "--loss-type sft_loss",
            "--disable-compute-advantages-and-returns",
            "--custom-reward-post-process-path a.b",
            "--custom-advantage-function-path a.b",
        ],
    )
    def test_one_is_the_default_where_nothing_is_compared(self, parse, words):
        args = parse(*words.split())
        assert args.n_samples_per_prompt == 1
        assert args.grpo_std_normalization is False


class TestPlacement:
    def test_documented_slots_are_kept_when_given(self, parse):
        args = parse(*"--actor-num-nodes 2 --actor-num-gpus-per-node 4 --rollout-num-gpus 6".split())
        assert (args.world_size, args.data_parallel_size, args.rollout_num_engines) == (8, 8, 6)
        assert args.num_gpus_per_node == 4

    def test_default_node_size_with_a_gpu_is_the_documented_one(self, parse, monkeypatch):
        monkeypatch.setattr(resolve_module, "has_gpu", lambda: True)
        args = parse("--rollout-engine", "embedded")
        assert (args.actor_num_gpus_per_node, args.num_gpus_per_node) == (8, 8)
        assert (args.precision, args.bf16, args.distributed_backend) == ("bf16", True, "nccl")

    def test_rollout_only_takes_the_rollout_slots(self, parse):
        args = parse(*"--debug-rollout-only --rollout-num-gpus 2 --actor-num-gpus-per-node 8".split())
        assert (args.actor_num_nodes, args.actor_num_gpus_per_node) == (1, 2)

    def test_train_only_starts_no_engine(self, parse):
        assert parse("--debug-train-only").rollout_num_engines == 0


class TestSharedSlots:
    @pytest.mark.parametrize(
        ("words", "rollout_slots", "shared", "offloads"),
        [
            ("", 2, 0, (False, False)),
            ("--colocate", 2, 2, (True, True)),
            ("--colocate --rollout-num-gpus 1", 1, 1, (True, True)),
            ("--colocate --rollout-num-gpus 3", 3, 2, (True, True)),
            ("--colocate --no-offload-train", 2, 2, (False, True)),
            ("--colocate --no-offload-rollout", 2, 2, (True, False)),
            ("--colocate --no-offload-train --no-offload-rollout", 2, 2, (False, False)),
            ("--offload", 2, 0, (True, True)),
            ("--offload-train", 2, 0, (True, False)),
            ("--colocate --debug-train-only", 2, 0, (True, True)),
            ("--colocate --debug-rollout-only", 2, 0, (False, False)),
            ("--offload --debug-rollout-only", 2, 0, (False, False)),
        ],
    )
    def test_slots_and_offloads(self, parse, words, rollout_slots, shared, offloads):
        args = parse("--actor-num-gpus-per-node", "2", *words.split())
        assert (args.rollout_num_gpus, args.num_shared_engines) == (rollout_slots, shared)
        assert (args.offload_train, args.offload_rollout) == offloads

    def test_offload_of_engines_that_share_nothing_is_said(self, parse):
        assert said(parse("--offload-rollout"), "--offload-rollout changes nothing")
        assert not said(parse("--colocate"), "changes nothing")

    def test_strict_args_accepts_the_slots_of_colocate(self, parse):
        words = "--colocate --actor-num-gpus-per-node 1 --rollout-batch-size 4 --n-samples-per-prompt 2 --num-rollout 1"
        assert parse("--strict-args", *words.split(), "--global-batch-size", "8").rollout_num_gpus == 1

    def test_generation_that_never_stops_cannot_share_slots(self, parse):
        path = "slime.rollout.fully_async_rollout.generate_rollout_fully_async"
        parse("--rollout-function-path", path)
        with pytest.raises(UserError, match="--colocate"):
            parse("--rollout-function-path", path, "--colocate")

    def test_look_ahead_loop_refuses_shared_slots_and_keeps_its_trainer_awake(self, parse):
        with pytest.raises(UserError, match="--colocate: train_async.py"):
            fit_to_async_loop(parse("--colocate"))
        args = parse("--offload-train")
        fit_to_async_loop(args)
        assert not args.offload_train and said(args, "--offload-train is off")


class TestPrecision:
    @pytest.mark.parametrize(
        ("words", "trainer", "engine"),
        [
            ("", "fp32", "fp32"),
            ("--bf16", "bf16", "bf16"),
            ("--fp16", "fp16", "fp16"),
            ("--precision bf16", "bf16", "bf16"),
            ("--precision bf16 --rollout-precision fp32", "bf16", "fp32"),
        ],
    )
    def test_number_formats_follow_the_flags(self, parse, words, trainer, engine):
        args = parse(*words.split())
        assert (args.precision, args.rollout_precision) == (trainer, engine)
        assert (args.bf16, args.fp16) == (trainer == "bf16", trainer == "fp16")

    @pytest.mark.parametrize("words", ["--bf16 --fp16", "--bf16 --precision fp32"])
    def test_contradictions_are_refused(self, parse, words):
        with pytest.raises(UserError, match="bf16"):
            parse(*words.split())

    def test_a_machine_without_gpu_uses_gloo_and_the_embedded_engine(self, parse):
        args = parse()
        assert (args.distributed_backend, args.rollout_engine, args.router_policy) == (
            "gloo",
            "embedded",
            "round_robin",
        )

    def test_router_policy_that_was_given_is_kept(self, parse):
        assert parse("--router-policy", "cache_aware").router_policy == "cache_aware"

    def test_sglang_engine_without_the_package_is_refused(self, parse, monkeypatch):
        monkeypatch.setattr(resolve_module.importlib.util, "find_spec", lambda name: None)
        with pytest.raises(UserError, match="--rollout-engine sglang: the sglang package is not installed"):
            parse("--rollout-engine", "sglang")

    def test_sglang_of_another_environment_is_taken(self, parse, tmp_path):
        args = parse("--rollout-engine", "sglang", "--sglang-python", sys.executable, "--sglang-log-level", "error")
        assert (args.rollout_engine, args.sglang_python) == ("sglang", sys.executable)
        assert args.sglang_given == {"log_level": "error"}  # the server is not told about its own interpreter
        assert parse("--sglang-python", sys.executable).rollout_engine == "embedded"  # auto stays with the GPU rule
        with pytest.raises(UserError, match="--sglang-python .*nothing: no such program"):
            parse("--rollout-engine", "sglang", "--sglang-python", str(tmp_path / "nothing"))


class TestAlgorithm:
    def test_upper_clip_follows_the_lower(self, parse):
        assert parse("--eps-clip", "0.3").eps_clip_high == 0.3
        assert parse("--eps-clip", "0.3", "--eps-clip-high", "0.4").eps_clip_high == 0.4

    @pytest.mark.parametrize("estimator", ["reinforce_plus_plus", "reinforce_plus_plus_baseline"])
    def test_reinforce_plus_plus_whitens_and_says_so(self, parse, estimator):
        args = parse("--advantage-estimator", estimator)
        assert args.normalize_advantages is True
        assert said(args, "--normalize-advantages is on")

    def test_small_clip_with_cispo_is_said(self, parse):
        assert said(parse("--advantage-estimator", "cispo"), "cispo with --eps-clip 0.2")

    def test_cost_balancing_turns_data_balancing_on(self, parse):
        args = parse(*"--use-dynamic-batch-size --max-tokens-per-gpu 512 --balance-by-flops".split())
        assert args.balance_data is True
        assert args.log_probs_max_tokens_per_gpu == 512

    def test_rounds_win_over_epochs(self, parse):
        args = parse(*"--num-rollout 3 --num-epoch 2".split())
        assert args.num_rollout == 3
        assert said(args, "--num-epoch 2 is ignored")

    def test_context_limit_bounds_the_prompt(self, parse):
        args = parse("--rollout-max-context-len", "128")
        assert (args.rollout_max_prompt_len, args.eval_max_context_len) == (127, 128)

    def test_eval_values_follow_the_rollout_values(self, parse):
        args = parse(*"--rollout-function-path a.b --reward-key score".split())
        assert (args.eval_function_path, args.eval_reward_key) == ("a.b", "score")


class TestRunFolder:
    def test_name_holds_the_prompt_file(self, parse, tmp_path):
        args = parse()
        assert args.run_name.endswith("-train")
        assert args.run_dir == str(tmp_path / "outputs" / args.run_name)

    def test_runs_that_start_in_the_same_second_have_folders_of_their_own(self, parse):
        assert len({parse().run_name for _ in range(4)}) == 4

    def test_slice_is_no_part_of_the_name(self, parse, data):
        assert parse("--prompt-data", data + "@[0:1]").run_name.endswith("-train")

    def test_given_name_and_folder(self, parse, tmp_path):
        assert parse("--run-name", "first", "--output-dir", "out").run_dir == str(tmp_path / "out" / "first")

    def test_existing_run_folder_is_said_and_no_resume_takes_a_fresh_one(self, parse, tmp_path):
        folder = tmp_path / "outputs" / "first"
        folder.mkdir(parents=True)
        (folder / "metrics.jsonl").touch()  # of a run that came to no round
        args = parse("--run-name", "first", "--no-resume")
        assert args.run_dir == str(folder) and not said(args, "first")
        (folder / "metrics.jsonl").write_text("{}")
        again = parse("--run-name", "first")
        assert again.run_dir == str(folder) and said(again, "done again replace")
        fresh = parse("--run-name", "first", "--no-resume", "--save-interval", "2")
        assert fresh.run_dir.startswith(f"{folder}-") and fresh.save == f"{fresh.run_dir}/checkpoints"

    def test_name_is_no_path(self, parse):
        with pytest.raises(UserError, match="--run-name a/b"):
            parse("--run-name", "a/b")

    @pytest.mark.parametrize(
        ("words", "on"), [("", True), ("--use-tensorboard", True), ("--no-use-tensorboard", False)]
    )
    def test_tensorboard_is_on_unless_switched_off(self, parse, words, on):
        assert parse(*words.split()).use_tensorboard is on


class TestPaths:
    def test_paths_and_file_hooks_become_absolute(self, parse, tmp_path):
        (tmp_path / "hooks.py").write_text("def f(): ...\n")
        args = parse(
            *"--custom-generate-function-path hooks.py --custom-rm-path hooks.py:f --buffer-filter-path a.b.c "
            "--rollout-sample-hook-path hooks.py:f --save ckpt --dump-details dump --spec hooks.py f".split()
        )
        assert args.custom_generate_function_path == str(tmp_path / "hooks.py")
        assert args.custom_rm_path == str(tmp_path / "hooks.py") + ":f"
        assert args.buffer_filter_path == "a.b.c"
        assert args.spec == [str(tmp_path / "hooks.py"), "f"] and parse("--spec", "a.b", "f").spec == ["a.b", "f"]
        assert args.rollout_sample_hook_path == [str(tmp_path / "hooks.py") + ":f"]
        assert args.save == str(tmp_path / "ckpt")
        assert args.save_debug_rollout_data == str(tmp_path / "dump" / "rollout_data" / "{rollout_id}.pt")
        assert args.save_debug_train_data == str(tmp_path / "dump" / "train_data" / "{rollout_id}.pt")

    def test_home_is_expanded(self, parse):
        assert parse("--save", "~/ckpt").save == os.path.expanduser("~/ckpt")

    def test_a_dump_to_load_means_no_engine(self, parse, tmp_path):
        (tmp_path / "dump").mkdir()
        (tmp_path / "dump" / "0.pt").touch()
        args = parse("--load-debug-rollout-data", "dump/{rollout_id}.pt")
        assert args.debug_train_only is True
        assert args.load_debug_rollout_data.endswith("/dump/{rollout_id}.pt")


def test_evaluation_without_data_is_a_note(parse):
    args = parse("--eval-interval", "5")
    assert args.eval_interval is None
    assert said(args, "no evaluation")


def test_flags_that_miss_their_partner_are_said(parse, data):
    words = "--kl-loss-coef 0.1 --max-tokens-per-gpu 64 --mask-offpolicy-in-partial-rollout --eval-prompt-data a"
    args = parse(*words.split(), data)
    assert said(args, "--kl-loss-coef: no effect without --use-kl-loss")
    assert said(args, "--max-tokens-per-gpu: no effect without --use-dynamic-batch-size")
    assert said(args, "--mask-offpolicy-in-partial-rollout: no effect without --partial-rollout")
    assert said(args, "evaluation data without --eval-interval: no evaluation")
    args = parse(*"--use-kl-loss --kl-loss-coef 0.1 --use-dynamic-batch-size --max-tokens-per-gpu 64".split())
    assert not said(args, "no effect without")


@pytest.mark.parametrize(
    ("flags", "partner"),
    [
        ("--tis-clip 3 --tis-clip-low 0.5", "--use-tis"),
        ("--custom-tis-function-path hooks.tis", "--use-tis"),
        ("--opsm-delta 0.1", "--use-opsm"),
        ("--custom-loss-function-path hooks.loss", "--loss-type custom_loss"),
        ("--async-save", "--save ckpt"),
    ],
)
def test_flags_of_a_part_that_is_not_asked_for_are_said_to_do_nothing(parse, flags, partner):
    (note,) = [note for note in parse(*flags.split()).start_notes if "no effect without" in note]
    named = ", ".join(word for word in flags.split() if word.startswith("--"))
    assert note.startswith(f"{named}: no effect without {partner.removesuffix(' ckpt')}")
    assert not said(parse(*flags.split(), *partner.split()), "no effect without")


def test_defaults_given_by_hand_need_no_partner(parse):
    assert not said(parse(*"--kl-loss-coef 0.0 --tis-clip 2.0".split()), "no effect without")


def test_a_reward_type_beside_a_reward_function_is_said_to_be_left_to_it(parse, data):
    both = ("--rm-type", "math", "--custom-rm-path", "hooks.reward")
    assert said(parse(*both), "--rm-type math is left to the function of --custom-rm-path")
    assert not said(parse(*both[:2]), "is left to") and not said(parse(*both[2:]), "is left to")
    layers = parse("--spec", "a.b", "f", "--custom-model-provider-path", "a.b.c")
    assert said(layers, "--spec a.b f is left to the function of --custom-model-provider-path")


def test_sequence_parallel_without_tensor_parallel_is_said(parse):
    args = parse("--sequence-parallel", "--recompute-activations")
    assert args.sequence_parallel is False and said(args, "--sequence-parallel has no effect")
    assert args.recompute_granularity == "selective"


def test_flags_without_effect_are_said_when_given(parse):
    args = parse("--attention-backend", "flash", "--num-workers", "4", "--model-name", "qwen3")
    for text in (
        "--attention-backend has no effect",
        "--num-workers has no effect",
        "--model-name has no effect",
    ):
        assert said(args, text), text
    assert not any("no effect" in note for note in parse().start_notes)


def test_kernel_switches_reach_megatron_only_where_a_gpu_is(parse, monkeypatch):
    words = ("--enable-cuda-graph", "--attention-backend", "flash", "--rollout-engine", "embedded")
    args = parse(*words)
    assert (args.enable_cuda_graph, args.attention_backend) == (False, "auto")
    monkeypatch.setattr(resolve_module, "has_gpu", lambda: True)
    args = parse(*words)
    assert (args.enable_cuda_graph, args.attention_backend) == (True, "flash")


def test_optimizer_leaves_a_gpu_for_host_memory_only_where_one_is(parse, monkeypatch):
    words = ("--optimizer-cpu-offload", "--use-precision-aware-optimizer", "--rollout-engine", "embedded")
    args = parse(*words)
    assert not args.optimizer_cpu_offload and said(args, "--optimizer-cpu-offload has no effect: optimizer state")
    monkeypatch.setattr(resolve_module, "has_gpu", lambda: True)
    assert parse(*words).optimizer_cpu_offload and parse(*words).use_precision_aware_optimizer


def test_engine_size_must_divide_by_its_pipeline(parse):
    with pytest.raises(UserError, match="--rollout-num-gpus-per-engine 1 does not divide by --sglang-pp-size 2"):
        parse("--sglang-pp-size", "2")


def test_engine_data_parallelism_needs_dp_attention(parse):
    with pytest.raises(UserError, match="--sglang-dp-size 2 needs --sglang-enable-dp-attention"):
        parse("--sglang-dp-size", "2")
    assert parse("--sglang-dp-size", "2", "--sglang-enable-dp-attention").sglang_data_parallel_size == 2
