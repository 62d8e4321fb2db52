"""Derived values, in one documented order; the only place that changes args after parsing.

Order: custom config file, paths, unbuilt flags, debug modes, devices and precision, placement, rollout sizes,
algorithm, run folder, checkpoint, adapters, model shape, batch arithmetic, evaluation sets, engine arguments, roles, checks.
Everything that was assumed is said in ``args.start_notes``. It knows no torch and starts nothing.
"""

from __future__ import annotations

import argparse
import datetime
import glob
import importlib.util
import os
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass

from slime.config import (
    algorithm,
    checkpoint_paths,
    eval_rules,
    lora_rules,
    megatron_values,
    roles,
    unused,
    validate,
)
from slime.config.eval_datasets import build_eval_datasets
from slime.config.eval_rules import SFT_ROLLOUT
from slime.config.model_shape import fill_shape
from slime.config.paths import absolute_hook, make_paths_absolute, split_slice
from slime.config.spec import UserError
from slime.config.yaml_file import apply_custom_config

#: Flags that look like server flags but are the framework's own.
FRAMEWORK_SERVER_ARGS = frozenset(
    """sglang_server_concurrency sglang_config sglang_router_ip sglang_router_port sglang_router_request_timeout_secs
    sglang_python router_policy router_log_level""".split()
)


@dataclass
class Run:
    """What the derivation steps share: the arguments, which of them were given, and what to say at start."""

    args: argparse.Namespace
    given: set[str]
    notes: list[str]

    def assume(self, dest: str, value, text: str) -> None:
        """Take a lenient default and say so; under --strict-args that is an error."""
        if self.args.strict_args:
            raise UserError(f"{text} (--strict-args assumes nothing)")
        setattr(self.args, dest, value)
        self.notes.append(text)


def resolve(args: argparse.Namespace, given: set[str], notes: list[str]) -> argparse.Namespace:
    """Derive every value that depends on others and check the result.

    Raises: UserError; all failed checks of validate.py come in one error.
    """
    run = Run(args, set(given), list(notes))
    apply_custom_config(args, run.given, run.notes)
    make_paths_absolute(args)
    validate.refuse_unbuilt(args, run.given)
    run.notes += validate.drop_noops(args, run.given, has_gpu())
    for step in STEPS:
        step(run)
    validate.check(args, run.given, run.notes)
    args.start_notes = run.notes
    return args


def debug_modes(run: Run) -> None:
    """Dump folders; a loaded dump means that no engine starts."""
    args = run.args
    if args.dump_details:
        args.save_debug_rollout_data = os.path.join(args.dump_details, "rollout_data", "{rollout_id}.pt")
        args.save_debug_train_data = os.path.join(args.dump_details, "train_data", "{rollout_id}.pt")
    for flag, path in (
        ("--save-debug-rollout-data", args.save_debug_rollout_data),
        ("--save-debug-train-data", args.save_debug_train_data),
    ):
        if path and "{rollout_id" not in path:
            run.notes.append(f"{flag} {path} has no {{rollout_id}}: each round replaces the dump of the one before")
    if args.load_debug_rollout_data and not args.debug_train_only:
        args.debug_train_only = True
        run.notes.append("--load-debug-rollout-data: samples come from the dump, no engine starts")


def has_gpu() -> bool:
    """Say whether this machine shows a CUDA device, without importing torch."""
    if os.environ.get("CUDA_VISIBLE_DEVICES", "0").strip() in ("", "-1"):
        return False
    return bool(glob.glob("/dev/nvidia[0-9]*")) or (
        os.path.exists("/dev/dxg") and shutil.which("nvidia-smi") is not None
    )


def devices(run: Run) -> None:
    """Number formats, engine kind and process-group backend of this machine."""
    args, gpu = run.args, has_gpu()
    args.has_gpu = gpu
    if args.bf16 and args.fp16:
        raise UserError("--bf16 and --fp16 exclude each other")
    asked = "bf16" if args.bf16 else "fp16" if args.fp16 else None
    if asked and args.precision not in ("auto", asked):
        raise UserError(f"--precision {args.precision} and --{asked} contradict each other")
    if args.precision == "auto":
        args.precision = asked or ("bf16" if gpu else "fp32")
    args.bf16, args.fp16 = args.precision == "bf16", args.precision == "fp16"
    if args.rollout_precision in (None, "auto"):
        args.rollout_precision = args.precision
    rollout_engine(args, gpu)
    if not gpu:
        args.distributed_backend = "gloo"
    if args.rollout_engine == "embedded" and "router_policy" not in run.given:
        args.router_policy = "round_robin"


def rollout_engine(args: argparse.Namespace, gpu: bool) -> None:
    """Resolve --rollout-engine auto and check that SGLang is there when it is the engine."""
    python = args.sglang_python
    if python and not os.access(python, os.X_OK):
        raise UserError(f"--sglang-python {python}: no such program")
    has_sglang = bool(python) or importlib.util.find_spec("sglang") is not None
    if args.rollout_engine == "auto":
        args.rollout_engine = "sglang" if gpu and has_sglang else "embedded"
    if args.rollout_engine == "sglang" and not has_sglang:
        raise UserError(
            "--rollout-engine sglang: the sglang package is not installed here (pip install 'slime[gpu]'), and "
            "--sglang-python names no other environment"
        )


def placement(run: Run) -> None:
    """Slots of the trainer and of the engines, and who leaves memory to whom."""
    args, given = run.args, run.given
    if "actor_num_gpus_per_node" not in given and not has_gpu() and not args.strict_args:
        run.assume("actor_num_gpus_per_node", 1, "--actor-num-gpus-per-node is 1: this machine has no GPU")
    actor = args.actor_num_nodes * args.actor_num_gpus_per_node
    if args.rollout_num_gpus is None and args.colocate:
        args.rollout_num_gpus = actor
    if args.rollout_num_gpus is None:
        run.assume("rollout_num_gpus", actor, f"--rollout-num-gpus is {actor}, as many as the trainer has")
    if args.debug_rollout_only:
        if args.rollout_num_gpus == 0:
            args.actor_num_nodes = args.actor_num_gpus_per_node = 0
        else:
            args.actor_num_gpus_per_node = min(8, args.rollout_num_gpus)
            args.actor_num_nodes = args.rollout_num_gpus // args.actor_num_gpus_per_node
        args.colocate = False
    if "num_gpus_per_node" not in given and 0 < args.actor_num_gpus_per_node < 8:
        args.num_gpus_per_node = args.actor_num_gpus_per_node
    args.world_size = args.actor_num_nodes * args.actor_num_gpus_per_node
    args.use_critic = args.advantage_estimator == "ppo" and not args.debug_rollout_only
    args.critic_num_nodes, args.critic_num_gpus_per_node = args.actor_num_nodes, args.actor_num_gpus_per_node
    args.num_critic_slots = args.world_size if args.use_critic and args.critic_slots == "own" else 0
    args.rollout_external = False
    args.rounds_ahead = 0  # that a loop generates before the one in training; fit_to_async_loop says otherwise
    per_engine = max(1, args.rollout_num_gpus_per_engine)
    args.rollout_num_engines = 0 if args.debug_train_only else args.rollout_num_gpus // per_engine
    # Engines take slots in order, so those that lie on trainer slots come first.
    shared = min(args.rollout_num_engines, args.world_size // per_engine)
    args.num_shared_engines = shared if args.colocate else 0
    offloads(run)


def offloads(run: Run) -> None:
    """Both sides leave their memory to the other when they share slots, unless told otherwise."""
    args = run.args
    if args.debug_rollout_only:
        args.offload_train = args.offload_rollout = False
        return
    for dest in ("offload_train", "offload_rollout"):
        if getattr(args, dest) is None:
            setattr(args, dest, args.offload or args.colocate)
    args.offload_train = args.offload_train or (args.use_critic and args.critic_slots == "shared")
    if args.offload_rollout and not args.num_shared_engines:
        run.notes.append("--offload-rollout changes nothing: no engine is on a slot of the trainer (--colocate)")


def compares_responses(args: argparse.Namespace) -> bool:
    """Say whether the default advantage needs several responses of one prompt."""
    is_default = not (args.custom_advantage_function_path or args.custom_reward_post_process_path)
    is_policy = args.loss_type == "policy_loss" and args.compute_advantages_and_returns
    return (
        is_policy and is_default and args.rewards_normalization and args.advantage_estimator in algorithm.GROUP_RELATIVE
    )


def rollout_sizes(run: Run) -> None:
    """Batch, samples per prompt, rounds and context lengths."""
    args, given = run.args, run.given
    if "rollout_batch_size" not in given:
        run.assume("rollout_batch_size", 32, "--rollout-batch-size is 32")
    if "n_samples_per_prompt" not in given and compares_responses(args):
        text = f"--n-samples-per-prompt is 8: {args.advantage_estimator} compares the responses of a prompt"
        run.assume("n_samples_per_prompt", 8, text)
    if args.over_sampling_batch_size is None:
        args.over_sampling_batch_size = args.rollout_batch_size
    if args.max_staleness is not None and args.partial_rollout and args.partial_rollout_max_age is None:
        left = max(0, args.max_staleness - (args.async_buffer_size + args.update_weights_interval - 1))
        run.assume("partial_rollout_max_age", left, f"--partial-rollout-max-age is {left}: --max-staleness leaves that")
    if args.num_rollout is not None and args.num_epoch is not None:
        run.notes.append(f"--num-epoch {args.num_epoch} is ignored: --num-rollout {args.num_rollout} is given")
    if args.num_rollout is None and args.num_epoch is None:
        run.assume("num_epoch", 1, "one epoch: neither --num-rollout nor --num-epoch is given")
    if args.n_samples_per_prompt == 1:
        args.grpo_std_normalization = False
    if args.eval_max_context_len is None:
        args.eval_max_context_len = args.rollout_max_context_len
    is_sft = args.rollout_function_path.startswith(SFT_ROLLOUT)  # its prompts are whole conversations
    if args.rollout_max_context_len is not None and args.rollout_max_prompt_len is None and not is_sft:
        args.rollout_max_prompt_len = args.rollout_max_context_len - 1
    if args.eval_function_path is None:
        args.eval_function_path = args.rollout_function_path
        if args.rollout_function_path.startswith(eval_rules.FULLY_ASYNC) and args.eval_interval is not None:
            text = f"--eval-function-path is {eval_rules.BUILT_IN}: the rollout function does not evaluate"
            run.assume("eval_function_path", eval_rules.BUILT_IN, text)
    if args.eval_reward_key is None:
        args.eval_reward_key = args.reward_key
    if args.num_rollout == 0:
        args.no_load_optim = True


#: model_type -> --loss-mask-type; every other family gets "auto", which works for any template.
LOSS_MASK_TYPES = {"qwen2": "qwen", "qwen2_moe": "qwen", "qwen3": "qwen3", "qwen3_moe": "qwen3", "qwen3_5": "qwen3_5"}


def loss_mask_type(run: Run) -> None:
    """The masks of SFT conversations fit the model's family; --strict-args keeps the flag's default."""
    args = run.args
    if args.loss_type != "sft_loss" or "loss_mask_type" in run.given or args.strict_args:
        return
    family = (args.model_arch.get("text_config") or args.model_arch).get("model_type")
    found = LOSS_MASK_TYPES.get(family, "auto")
    if found != args.loss_mask_type:
        run.assume("loss_mask_type", found, f"--loss-mask-type is {found}: it fits models of type {family}")


def algorithm_values(run: Run) -> None:
    """Values of the estimator and the losses that follow from others."""
    args = run.args
    if args.advantage_estimator not in algorithm.ESTIMATORS:
        args.advantage_estimator = absolute_hook(args.advantage_estimator)
    if args.eps_clip_high is None:
        args.eps_clip_high = args.eps_clip
    if args.advantage_estimator == "cispo" and args.eps_clip < 1:
        run.notes.append(f"cispo with --eps-clip {args.eps_clip}: usual values are --eps-clip 1.0 --eps-clip-high 4")
    needs = ("reinforce_plus_plus", "reinforce_plus_plus_baseline")
    if args.advantage_estimator in needs and not args.normalize_advantages:
        run.assume("normalize_advantages", True, f"--normalize-advantages is on: {args.advantage_estimator} needs it")
    if args.balance_by_flops:
        args.balance_data = True
    if args.use_rollout_routing_replay:
        args.use_routing_replay = True
    if args.rollout_top_p != 1.0 and args.rollout_engine == "sglang":
        run.notes.append(
            f"--rollout-top-p {args.rollout_top_p}: SGLang has to answer custom_params.return_top_p_token_ids, which 0.5.23 as "
            "released does not; the first round ends the run when it does not"
        )
    if args.log_probs_max_tokens_per_gpu is None:
        args.log_probs_max_tokens_per_gpu = args.max_tokens_per_gpu
    if args.get_mismatch_metrics and args.use_rollout_logprobs:
        run.notes.append("--get-mismatch-metrics with --use-rollout-logprobs costs one more forward pass")


def run_folder(run: Run) -> None:
    """Name and folder of the run, and its trackers."""
    args = run.args
    if args.run_name is None:
        stem = os.path.basename(split_slice(args.prompt_data)[0]) if args.prompt_data else "run"
        now = datetime.datetime.now()  # to the microsecond: the runs of a sweep start together
        args.run_name = f"{now:%Y%m%d-%H%M%S-%f}-{os.path.splitext(stem)[0]}"
    if os.path.basename(args.run_name) != args.run_name or args.run_name in ("", ".", ".."):
        raise UserError(f"--run-name {args.run_name or '(empty)'}: a name, not a path (--output-dir gives the folder)")
    args.run_dir = os.path.join(args.output_dir, args.run_name)
    metrics = os.path.join(args.run_dir, "metrics.jsonl")
    if os.path.exists(metrics) and os.path.getsize(metrics):
        if args.no_resume:
            args.run_name += time.strftime("-%Y%m%d-%H%M%S")
            args.run_dir = os.path.join(args.output_dir, args.run_name)
            run.notes.append(f"--no-resume: an earlier run's folder stays, this one is {args.run_dir}")
        else:
            run.notes.append(f"{args.run_dir} exists: metrics of rounds that are done again replace the earlier ones")
    if args.use_tensorboard is None:
        args.use_tensorboard = not args.use_wandb


def model(run: Run) -> None:
    """The model's shape and name, from its config.json."""
    args = run.args
    if not args.debug_rollout_only:
        fill_shape(args, run.given, run.notes, args.hf_checkpoint)
    if args.model_name is None:
        args.model_name = str(
            (args.model_arch.get("architectures") or [args.model_arch.get("model_type", "")])[0]
        ).lower()


def batch_rule(run: Run) -> None:
    """rollout_batch_size x n_samples_per_prompt = global_batch_size x num_steps_per_rollout."""
    args = run.args
    rollouts = args.rollout_batch_size * args.n_samples_per_prompt
    shown = f"--rollout-batch-size {args.rollout_batch_size} x --n-samples-per-prompt {args.n_samples_per_prompt} = {rollouts} rollouts"
    steps, batch = args.num_steps_per_rollout, args.global_batch_size
    if rollouts < 1:  # the range checks name the flag
        args.global_batch_size, args.num_steps_per_rollout = batch or 0, steps or 0
        return
    if steps is not None and steps < 1:
        raise UserError(f"--num-steps-per-rollout {steps}: must be at least 1")
    if batch is not None and batch < 1:
        raise UserError(f"--global-batch-size {batch}: must be at least 1")
    if steps is not None and rollouts % steps:
        raise UserError(f"{shown} cannot be split into --num-steps-per-rollout {steps} equal steps")
    if steps is not None and batch is not None and steps * batch != rollouts:
        raise UserError(f"{shown}, but --global-batch-size {batch} x --num-steps-per-rollout {steps} = {steps * batch}")
    if batch is None:
        args.global_batch_size = rollouts // (steps or 1)
        if steps is None:
            run.assume("global_batch_size", rollouts, f"--global-batch-size is {rollouts}: one step per round")
    elif batch > rollouts:
        raise UserError(f"{shown}, fewer than --global-batch-size {batch}: no step would be full")
    elif rollouts % batch:
        run.notes.append(
            f"{shown}, --global-batch-size {batch}: the last {rollouts % batch} of each round are not trained"
        )
    args.num_steps_per_rollout = rollouts // args.global_batch_size


def evaluation(run: Run) -> None:
    """Evaluation sets; an interval without sets means no evaluation."""
    args = run.args
    args.eval_datasets = build_eval_datasets(args)
    args.eval_prompt_data = [word for item in args.eval_datasets for word in (item.name, item.path)] or None
    if args.eval_interval is not None and not args.eval_datasets:
        run.assume(
            "eval_interval", None, f"--eval-interval {args.eval_interval} without evaluation data: no evaluation"
        )
    elif args.eval_datasets and args.eval_interval is None:
        run.notes.append("evaluation data without --eval-interval: no evaluation")
    if (
        args.eval_interval is not None
        and args.debug_train_only
        and not args.rollout_function_path.startswith(SFT_ROLLOUT)
    ):
        run.notes.append(f"--eval-interval {args.eval_interval} has no effect: no engine starts")
    for item in args.eval_datasets:
        if item.unread:
            run.notes.append(f"evaluation set {item.name}: only functions of your own read {', '.join(item.unread)}")
    if args.multimodal_keys and not args.debug_rollout_only:
        run.notes.append(
            "--multimodal-keys: media reach engines and the trainer's shards; the trainer's models read text only"
        )


def engine_arguments(run: Run) -> None:
    """Server arguments that the engine layout decides."""
    args = run.args
    per_engine, pp = args.rollout_num_gpus_per_engine, args.sglang_pp_size
    if pp > 1 and per_engine % pp:
        raise UserError(f"--rollout-num-gpus-per-engine {per_engine} does not divide by --sglang-pp-size {pp}")
    args.sglang_tp_size = per_engine // pp
    if args.sglang_dp_size > 1 and not args.sglang_enable_dp_attention:
        raise UserError(f"--sglang-dp-size {args.sglang_dp_size} needs --sglang-enable-dp-attention")
    for dest, alias in (("dp", "data"), ("pp", "pipeline"), ("ep", "expert"), ("moe_dp", "moe_data")):
        setattr(args, f"sglang_{alias}_parallel_size", getattr(args, f"sglang_{dest}_size"))
    if args.deterministic_mode and not args.sglang_enable_deterministic_inference:
        args.sglang_enable_deterministic_inference = True
        run.given.add("sglang_enable_deterministic_inference")
        run.notes.append("--deterministic-mode: engines compute each request by itself, which is slower")
    # What the user gave goes to the real servers as it is; their own defaults hold for the rest.
    for prefix in ("sglang", "router"):
        given = {dest for dest in run.given if dest.startswith(f"{prefix}_")} - FRAMEWORK_SERVER_ARGS
        setattr(
            args, f"{prefix}_given", {dest.removeprefix(f"{prefix}_"): getattr(args, dest) for dest in sorted(given)}
        )
    if args.sglang_router_ip and ":" in args.sglang_router_ip and not args.sglang_router_ip.startswith("["):
        args.sglang_router_ip = f"[{args.sglang_router_ip}]"


STEPS: tuple[Callable[[Run], None], ...] = (
    debug_modes,
    devices,
    placement,
    rollout_sizes,
    algorithm_values,
    run_folder,
    checkpoint_paths.resolve_checkpoints,
    lora_rules.resolve_lora,
    model,
    loss_mask_type,
    batch_rule,
    evaluation,
    engine_arguments,
    megatron_values.resolve_megatron,
    roles.resolve_roles,
    unused.note_unused,
)
