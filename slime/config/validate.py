"""Checks of the arguments of a run: what is not built, what contradicts itself, what is missing on disk.

Every check names the flag and the value. Checks change nothing (drop_noops does); those of ``CHECKS`` are collected, so that one error
shows all problems. It does not see data rows or weights.
"""

from __future__ import annotations

import argparse
import difflib
import math
import os
import re
from collections.abc import Iterator
from typing import Any

from slime.config import (
    algorithm,
    distillation,
    eval_rules,
    experts,
    layout,
    lora_rules,
    roles,
    rollout_rules,
    savings,
    sync_rules,
)
from slime.config.eval_datasets import where
from slime.config.eval_rules import BUILT_IN, FULLY_ASYNC
from slime.config.paths import split_file_hook, split_slice
from slime.config.registry import by_dest, framework_flags, spelling
from slime.config.rollout_rules import DEFAULT_DATA_SOURCE
from slime.config.spec import Flag, UserError
from slime.config.status import GPU_ONLY, MODEL_TYPES, OFF_VALUES, UNBUILT


def _is_used(flag: Flag, value: Any) -> bool:
    """Say whether a value needs what an unbuilt flag stands for."""
    values = UNBUILT[flag.dest][1] if flag.dest in UNBUILT else None
    if values is not None:
        return value in values
    if flag.action in ("false", "bool"):
        return value is (not flag.default)
    return value not in (flag.default, None, *OFF_VALUES.get(flag.dest, ()))


def refuse_unbuilt(args: argparse.Namespace, given: set[str]) -> None:
    """Refuse, in one error, every given flag whose capability is not built yet.

    Raises: UserError naming each flag, its value and what is missing; flags of one capability stand together.
    """
    by_reason: dict[str, list[str]] = {}
    for dest in sorted(given):
        for flag in by_dest().get(dest, ())[:1]:
            value = getattr(args, dest)
            if flag.status == "unbuilt" and _is_used(flag, value):
                words = " ".join(map(str, value)) if isinstance(value, list) else str(value)
                shown = flag.name if flag.action in ("true", "false", "bool") else f"{flag.name} {words}"
                by_reason.setdefault(flag.reason, []).append(shown)
    _raise([f"{', '.join(shown)}: {reason}" for reason, shown in by_reason.items()])


def drop_noops(args: argparse.Namespace, given: set[str], has_gpu: bool) -> list[str]:
    """Name the given flags that change nothing here, and put switches of a GPU back where none is."""
    notes = []
    for dest in sorted(given):
        flag = by_dest().get(dest, (None,))[0]
        if flag is None or flag.status != "noop" or getattr(args, dest) == flag.default:
            continue
        if flag.reason in GPU_ONLY:
            if has_gpu:
                continue
            setattr(args, dest, flag.default)
        notes.append(f"{flag.name} has no effect: {flag.reason}")
    return notes


Problems = Iterator[str]


def _finite(args, given) -> Problems:
    """No number that was given is nan or infinite: both would turn weights into nan later."""
    for dest in sorted(given):
        value = getattr(args, dest)
        if isinstance(value, float) and not math.isfinite(value):
            yield f"{spelling(dest)} {value}: must be a finite number"


def _ranges(args, given) -> Problems:
    """Numbers in their ranges."""
    positive = (
        "rollout_batch_size n_samples_per_prompt n_samples_per_eval_prompt micro_batch_size max_tokens_per_gpu "
        "log_probs_max_tokens_per_gpu update_weights_interval eval_interval save_interval save_keep_last ref_update_interval "
        "update_weight_buffer_size rollout_num_gpus_per_engine num_gpus_per_node omp_num_threads rm_timeout "
        "async_buffer_size max_turns rollout_max_response_len sglang_server_concurrency eval_max_response_len "
        "num_epoch distributed_timeout_minutes data_pad_size_multiplier rollout_temperature eval_temperature"
    ).split()
    may_be_zero = {"eval_temperature"}
    for dest in positive:
        value = getattr(args, dest)
        if value is not None and (value < 0 or (value == 0 and dest not in may_be_zero)):
            yield f"{spelling(dest)} {value}: must be above 0"
    not_negative = (
        "num_rollout start_rollout_id rollout_num_gpus num_data_workers lr weight_decay clip_grad max_staleness "
        "partial_rollout_max_age mismatch_alarm"
    )
    for dest in not_negative.split():
        value = getattr(args, dest)
        if value is not None and value < 0:
            yield f"{spelling(dest)} {value}: must not be negative"
    for dest in ("rollout_top_p", "eval_top_p", "load_debug_rollout_data_subsample"):
        value = getattr(args, dest)
        if value is not None and not 0 < value <= 1:
            yield f"{spelling(dest)} {value}: must be in (0, 1]"
    for dest in ("sglang_router_port", "teacher_port", "router_prometheus_port"):
        value = getattr(args, dest)
        if value is not None and not 1 <= value <= 65535:
            yield f"{spelling(dest)} {value}: a port is 1 to 65535"
    for dest in ("rollout_top_k", "eval_top_k"):
        value = getattr(args, dest)
        if value is not None and (value == 0 or value < -1):
            yield f"{spelling(dest)} {value}: must be -1 (off) or at least 1"


def _modes(args, given) -> Problems:
    """Debug modes and placement."""
    if args.debug_rollout_only and args.debug_train_only:
        yield "--debug-rollout-only and --debug-train-only exclude each other"
    for dest in ("actor_num_nodes", "actor_num_gpus_per_node"):
        if getattr(args, dest) < 1 and not args.debug_rollout_only:
            yield f"{spelling(dest)} {getattr(args, dest)}: must be at least 1"
    slots, each = args.rollout_num_gpus, args.rollout_num_gpus_per_engine
    if not args.debug_train_only and each >= 1 and slots % each:
        yield f"--rollout-num-gpus {slots} is not a multiple of --rollout-num-gpus-per-engine {each}"
    if not args.debug_train_only and slots == 0:
        yield "--rollout-num-gpus 0: no engine would generate"
    if args.colocate and args.rollout_function_path.startswith(FULLY_ASYNC):
        yield (
            f"--rollout-function-path {args.rollout_function_path} generates while the trainer trains, so it cannot share "
            "slots with it: leave --colocate out"
        )
    if args.save_debug_rollout_data and args.save_debug_rollout_data == args.save_debug_train_data:
        yield f"--save-debug-rollout-data and --save-debug-train-data are one file: {args.save_debug_train_data}"


def _algorithm(args, given) -> Problems:
    """Estimator, losses, corrections."""
    from slime.config.resolve import compares_responses

    yield from _estimator(args.advantage_estimator)
    if args.n_samples_per_prompt == 1 and compares_responses(args):
        yield (
            f"--n-samples-per-prompt 1 with --advantage-estimator {args.advantage_estimator}: every advantage would be "
            f"zero, because it compares the responses of a prompt ({', '.join(algorithm.GROUP_RELATIVE)} need at least 2)"
        )
    if args.kl_coef != 0 and args.kl_loss_coef != 0:
        yield f"--kl-coef {args.kl_coef} and --kl-loss-coef {args.kl_loss_coef}: use one of them"
    if args.eps_clip_c is not None and args.eps_clip_c <= 1:
        yield f"--eps-clip-c {args.eps_clip_c}: must be above 1"
    if args.use_rollout_logprobs and args.use_tis:
        yield "--use-rollout-logprobs and --use-tis exclude each other: with the first, both policies are the engine's"
    if args.get_mismatch_metrics and not args.custom_tis_function_path:
        yield "--get-mismatch-metrics needs --custom-tis-function-path, which computes them"
    own_reducer = args.calculate_per_token_loss or args.custom_pg_loss_reducer_function_path
    if args.advantage_estimator == "dr_grpo" and args.rollout_max_response_len is None and not own_reducer:
        yield "--advantage-estimator dr_grpo needs --rollout-max-response-len, by which it divides every response's loss"
    if args.loss_type == "custom_loss" and not args.custom_loss_function_path:
        yield "--loss-type custom_loss needs --custom-loss-function-path"
    if args.tis_clip_low > args.tis_clip:
        yield f"--tis-clip-low {args.tis_clip_low} is above --tis-clip {args.tis_clip}"
    if args.only_train_params_name_list and args.freeze_params_name_list:
        yield "--only-train-params-name-list and --freeze-params-name-list exclude each other"
    worst = args.async_buffer_size + args.update_weights_interval - 1
    age = args.partial_rollout_max_age or 0
    if args.max_staleness is not None and args.max_staleness < worst + age:
        partial = f" + partial_rollout_max_age {age}" if age else ""
        yield (
            f"--max-staleness {args.max_staleness} cannot be kept: samples get up to async_buffer_size "
            f"{args.async_buffer_size} + update_weights_interval {args.update_weights_interval} - 1{partial} = {worst + age} "
            "versions old"
        )


def _estimator(name: str) -> Problems:
    """A known name, or the path of a function."""
    if name in algorithm.ESTIMATORS:
        return
    file = split_file_hook(name)
    if file and not os.path.isfile(file[0]):
        yield f"--advantage-estimator {name}: no such file"
    elif file and file[1] is None:
        yield f"--advantage-estimator {name}: name the function too, file.py:function"
    elif not file and "." not in name:
        near = difflib.get_close_matches(name, algorithm.ESTIMATORS, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        yield f"--advantage-estimator {name}: one of {', '.join(algorithm.ESTIMATORS)}, or a function by path{hint}"


def _trainer(args, given) -> Problems:
    """Batches against slots, and the model family."""
    if args.debug_rollout_only:
        return
    family = (args.model_arch.get("text_config") or args.model_arch).get("model_type")
    if family not in MODEL_TYPES and not args.custom_model_provider_path:
        yield f"--hf-checkpoint {args.hf_checkpoint}: model_type {family!r} is not built yet, {', '.join(MODEL_TYPES)} are"
    if args.padded_vocab_size is not None and args.vocab_size is not None and args.padded_vocab_size < args.vocab_size:
        yield f"--padded-vocab-size {args.padded_vocab_size} is below --vocab-size {args.vocab_size}"
    if args.use_dynamic_batch_size and args.max_tokens_per_gpu is None:
        yield "--use-dynamic-batch-size needs --max-tokens-per-gpu"
    if args.balance_by_flops and not args.use_dynamic_batch_size:
        yield "--balance-by-flops needs --use-dynamic-batch-size"
    batch, dp, micro = args.global_batch_size, args.data_parallel_size, args.micro_batch_size
    group = args.microbatch_group_size_per_vp_stage or 1
    virtual = "" if group == 1 else f" x {group} micro-batches of the virtual pipeline"
    if not dp or args.use_dynamic_batch_size or micro < 1:
        return
    if batch < dp * group:
        yield (
            f"--global-batch-size {batch} is below the {dp} data-parallel ranks{virtual}: each needs a sample in every step "
            "(--use-dynamic-batch-size takes any number)"
        )
    elif batch % (dp * micro * group) and not _makes_own_samples(args):
        yield (
            f"--global-batch-size {batch} does not divide by {dp} data-parallel ranks{virtual} x --micro-batch-size "
            f"{micro} = {dp * micro * group} (--use-dynamic-batch-size packs any number)"
        )


def _makes_own_samples(args) -> bool:
    """Say whether user code may change the number of samples in a step."""
    hooks = (args.custom_generate_function_path, args.custom_convert_samples_to_train_data_path)
    return any(hooks) or args.rollout_function_path != BUILT_IN


def _optimizer(args, given) -> Problems:
    """Optimizer and learning-rate schedule."""
    if args.optimizer not in ("adam", "sgd"):
        yield f"--optimizer {args.optimizer} is not built yet: adam and sgd are"
    if args.use_stateless_adam and not (args.optimizer == "adam" and args.no_save_optim):
        yield "--use-stateless-adam needs --optimizer adam and --no-save-optim: there is no state to save"
    if args.use_stateless_adam and args.use_precision_aware_optimizer:
        yield "--use-stateless-adam and --use-precision-aware-optimizer exclude each other"
    if args.min_lr > args.lr and args.lr > 0:
        yield f"--min-lr {args.min_lr} is above --lr {args.lr}"
    if args.lr_warmup_fraction is not None and args.lr_warmup_iters:
        yield f"--lr-warmup-fraction {args.lr_warmup_fraction} and --lr-warmup-iters {args.lr_warmup_iters}: use one of them"
    yield from _schedule(args)
    if args.recompute_method and args.recompute_granularity != "full":
        yield f"--recompute-method {args.recompute_method} needs --recompute-granularity full"


def _schedule(args) -> Problems:
    """A warmup that ends before the schedule does, where the number of steps is known already."""
    steps = args.lr_decay_iters
    if steps is None and args.num_rollout and args.global_batch_size:
        steps = args.num_rollout * args.rollout_batch_size * args.n_samples_per_prompt // args.global_batch_size
    if steps is None or args.lr_decay_style == "constant" or args.debug_rollout_only:
        return
    fraction = args.lr_warmup_fraction
    warmup = fraction * steps if fraction is not None else args.lr_warmup_iters
    if warmup >= steps:
        yield schedule_problem(steps, warmup)


def schedule_problem(steps: int, warmup: float) -> str:
    """What is wrong with a warmup that is not shorter than the schedule, both in optimizer steps."""
    return (
        f"the learning-rate schedule has {steps} steps (--num-rollout or --lr-decay-iters) and a warmup of {warmup:g} "
        "(--lr-warmup-iters or --lr-warmup-fraction): the warmup must be shorter"
    )


def _patterns(args, given) -> Problems:
    """Regular expressions over parameter names."""
    for dest in ("only_train_params_name_list", "freeze_params_name_list"):
        for pattern in getattr(args, dest) or ():
            try:
                re.compile(pattern)
            except re.error as error:
                yield f"{spelling(dest)} {pattern}: not a regular expression ({error})"


TEMPLATES = {
    "save_debug_rollout_data": ("rollout_id",),
    "load_debug_rollout_data": ("rollout_id",),
    "save_debug_train_data": ("rollout_id", "rank"),
}


def _templates(args, given) -> Problems:
    """Paths in which numbers are filled in; evaluations are dumped as `eval_<number>`."""
    for dest, names in TEMPLATES.items():
        path = getattr(args, dest)
        numbers = [0, "eval_0"] if dest == "save_debug_rollout_data" and args.eval_interval else [0]
        try:
            for number in numbers if path else ():
                path.format(**dict.fromkeys(names, number))
        except (KeyError, IndexError, ValueError, AttributeError) as error:
            known = " and ".join(f"{{{name}}}" for name in names)
            yield f"{spelling(dest)} {path}: only {known} can be filled in ({type(error).__name__}: {error})"


def _files(args, given) -> Problems:
    """Files that must exist before anything starts."""
    if args.prompt_data and args.data_source_path.startswith(DEFAULT_DATA_SOURCE) and not args.load_debug_rollout_data:
        path, rows = split_slice(args.prompt_data)
        yield from _data_file("--prompt-data", path, rows)
    for item in args.eval_datasets:
        path, rows = split_slice(item.path)
        yield from _data_file(where(args, item), path, rows)
    for flag in framework_flags():
        value = getattr(args, flag.dest)
        if flag.type != "hook" or not value:
            continue
        for hook in value if isinstance(value, list) else [value]:
            parts = split_file_hook(hook)
            if parts and not os.path.isfile(parts[0]):
                folder, name = os.path.split(parts[0])
                near = difflib.get_close_matches(name, os.listdir(folder) if os.path.isdir(folder) else (), n=1)
                yield f"{flag.name} {hook}: no such file" + (f" (did you mean {near[0]}?)" if near else "")
            elif parts is None and "." not in hook:
                yield f"{flag.name} {hook}: expected package.module.attribute, file.py or file.py:attribute"


def _data_file(what: str, path: str, rows: str | None) -> Problems:
    """A data file with its slice."""
    if not os.path.exists(path):
        yield f"{what} {path}: no such file"
    elif not os.path.isdir(path) and not path.endswith((".jsonl", ".parquet")):
        yield f"{what} {path}: expected a .jsonl or .parquet file"
    bounds = [] if rows is None else [part.strip().lstrip("-") for part in rows.split(":")]
    if rows is not None and (len(bounds) != 2 or not all(part.isdigit() or not part for part in bounds)):
        yield f"{what} {path}@[{rows}]: a slice is @[first:last]"


CHECKS = (
    _finite,
    _ranges,
    _modes,
    rollout_rules.problems,
    _algorithm,
    eval_rules.problems,
    savings.problems,
    experts.problems,
    lora_rules.problems,
    sync_rules.problems,
    layout.problems,
    _trainer,
    _optimizer,
    _patterns,
    _templates,
    _files,
    distillation.problems,
    roles.problems,
)


def problems(args: argparse.Namespace, given: set[str]) -> list[str]:
    """Give every problem of derived arguments, without raising."""
    return [text for check_one in CHECKS for text in check_one(args, given)]


def check(args: argparse.Namespace, given: set[str], notes: list[str]) -> None:
    """Run all checks.

    Raises: UserError with every problem, one per line when there are several.
    """
    _raise(problems(args, given))


def fit_to_async_loop(args: argparse.Namespace) -> None:
    """Make the arguments fit a loop that generates and trains at the same time.

    Raises: UserError when trainer and engines would share slots.
    """
    if args.colocate:
        raise UserError(
            "--colocate: train_async.py generates while it trains, so engines need slots of their own "
            "(--rollout-num-gpus), or use train.py"
        )
    if args.mismatch_alarm is None:
        args.mismatch_alarm = 0.1  # the gap holds the steps between generation and training
    _raise(list(roles.old_policy_problems(args)))
    if args.offload_train:
        args.offload_train = False
        if not args.use_critic:
            args.start_notes.append("--offload-train is off: the trainer of train_async.py is never idle")
    args.rounds_ahead = args.async_buffer_size


def _raise(found: list[str]) -> None:
    """Raise one error that holds every problem."""
    if len(found) == 1:
        raise UserError(found[0])
    if found:
        raise UserError(f"{len(found)} problems:\n  - " + "\n  - ".join(found))
