"""What the flags of low-rank adapters (LoRA) imply, and what they exclude.

Sets on args: lora_rank, lora_alpha, target_modules (Hugging Face projections, in the order of a layer), lora_adapters (names),
lora_adapter_path (dict name -> PEFT folder) and lora_base (where the frozen weights come from). It reads the config files of
adapter folders and no weights.
"""

from __future__ import annotations

import argparse
import json
import os
import re
from collections.abc import Iterator

from slime.config.lora import FLAGS
from slime.config.paths import absolute
from slime.config.savings import has_experts
from slime.config.spec import UserError

#: Projections of a decoder layer under their Hugging Face names, and what Megatron's fused layers stand for.
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
FUSED = {
    "linear_qkv": ("q_proj", "k_proj", "v_proj"),
    "linear_proj": ("o_proj",),
    "linear_fc1": ("gate_proj", "up_proj"),
    "linear_fc2": ("down_proj",),
    "all-linear": PROJECTIONS,
}
_FULLY_ASYNC = "slime.rollout.fully_async_rollout"
DEFAULT_NAME = "actor"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*")


def resolve_lora(run) -> None:
    """Derive the values named above.

    Raises: UserError for names, targets or folders that do not exist.
    """
    args, given = run.args, run.given
    args.lora_adapters = args.lora_adapters or [DEFAULT_NAME]
    args.lora_adapter_path = _folders(args)
    if args.lora_adapter_path:
        _from_folder(run)
    if args.lora_rank == 0:
        for flag in FLAGS:
            if flag.dest in given and flag.dest != "lora_rank":
                run.notes.append(f"{flag.name} has no effect without --lora-rank")
        args.target_modules, args.lora_sync = [], "merged"
        args.lora_adapters, args.lora_adapter_path, args.lora_base = [DEFAULT_NAME], {}, None
        return
    args.target_modules = _projections(args.target_modules)
    if args.debug_rollout_only and args.lora_sync == "adapter":
        args.lora_sync = "merged"
        run.notes.append("--debug-rollout-only: no trainer sends adapters, engines generate with the base model")
    args.lora_base = _base(args)


def _folders(args: argparse.Namespace) -> dict[str, str]:
    """Read --lora-adapter-path: one folder, or name=folder for each adapter that has one."""
    folders = {}
    for word in args.lora_adapter_path or ():
        name, separator, path = word.partition("=")
        if not separator and len(args.lora_adapters) > 1:
            raise UserError(f"--lora-adapter-path {word}: with several --lora-adapters give name=folder")
        name, path = (name, path) if separator else (args.lora_adapters[0], word)
        if name not in args.lora_adapters or name in folders:
            raise UserError(
                f"--lora-adapter-path {word}: --lora-adapters are {', '.join(args.lora_adapters)}, each at most once"
            )
        folders[name] = absolute(path)
        if not os.path.isfile(os.path.join(folders[name], "adapter_config.json")):
            raise UserError(f"--lora-adapter-path {word}: no adapter_config.json there")
    return folders


def _from_folder(run) -> None:
    """Take rank, scaling and targets that were not given from the first folder."""
    args, given = run.args, run.given
    name, folder = next(iter(args.lora_adapter_path.items()))
    config = _adapter_config(folder)
    if "lora_rank" not in given:
        args.lora_rank = config["r"]
    if "lora_alpha" not in given:
        args.lora_alpha = _alpha(config)
    if "target_modules" not in given:
        targets = config["target_modules"]
        args.target_modules = [targets] if isinstance(targets, str) else list(targets)
    run.notes.append(
        f"adapter {name} starts from {folder}: rank {args.lora_rank}, alpha {args.lora_alpha:g}, "
        f"targets {' '.join(args.target_modules)}"
    )


def _adapter_config(folder: str) -> dict:
    """The adapter_config.json of a folder.

    Raises: UserError when it is none.
    """
    try:
        with open(os.path.join(folder, "adapter_config.json"), encoding="utf-8") as file:
            config = json.load(file)
        config["r"] + config["lora_alpha"], config["target_modules"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"--lora-adapter-path {folder}: adapter_config.json is not one of PEFT's LoRA: {type(error).__name__}: {error}"
        ) from None
    return config


def _alpha(config: dict) -> float:
    """The alpha that, divided by the rank, scales the adapter of a folder."""
    return float(config["lora_alpha"]) * (config["r"] ** 0.5 if config.get("use_rslora") else 1)


def _projections(words: list[str] | None) -> list[str]:
    """Return the Hugging Face projections that the words name, in the order of a layer."""
    chosen = set()
    for word in (part for text in words or ["all-linear"] for part in text.split(",") if part):
        if word not in FUSED and word not in PROJECTIONS:
            raise UserError(f"--target-modules {word}: one of {', '.join((*PROJECTIONS, *FUSED))}")
        chosen.update(FUSED.get(word, (word,)))
    return [name for name in PROJECTIONS if name in chosen]


def _base(args: argparse.Namespace) -> str:
    """Where the frozen weights come from: what the run started from, never a checkpoint of its adapters."""
    if args.resume_from is None:
        return args.load
    own = os.path.dirname(args.resume_from)
    started = args.started_from
    if started and os.path.realpath(started) not in (os.path.realpath(own), os.path.realpath(args.resume_from)):
        return started
    return args.ref_load or args.hf_checkpoint


def problems(args: argparse.Namespace, given: set[str]) -> Iterator[str]:
    """Give what is wrong with the flags, or cannot be combined with adapters."""
    if args.lora_rank < 0:
        yield f"--lora-rank {args.lora_rank}: must not be negative"
    if args.lora_rank <= 0:
        return
    if args.lora_alpha <= 0:
        yield f"--lora-alpha {args.lora_alpha}: must be above 0"
    if not 0 <= args.lora_dropout < 1:
        yield f"--lora-dropout {args.lora_dropout}: must be in [0, 1)"
    for name in args.lora_adapters:
        if not _NAME.fullmatch(name):
            yield f"--lora-adapters {name}: letters, digits, - and _ only"
    if len(set(args.lora_adapters)) != len(args.lora_adapters):
        yield f"--lora-adapters {' '.join(args.lora_adapters)}: a name stands twice"
    yield from _against_folders(args)
    yield from _against_experts(args)
    for dest in ("only_train_params_name_list", "freeze_params_name_list"):
        if getattr(args, dest):
            yield f"--{dest.replace('_', '-')} cannot be used with --lora-rank: adapters alone are trained"
    if {"load", "ref_load"} <= given and args.ref_load != args.lora_base and (args.use_kl_loss or args.kl_coef):
        yield f"--ref-load {args.ref_load}: with --lora-rank the reference is the base model, {args.lora_base}"
    if args.use_opd and args.opd_type == "megatron":
        yield "--opd-type megatron cannot be used with --lora-rank: the trainer holds one base model, no teacher"
    if args.lora_sync == "adapter" and args.rollout_engine == "sglang" and _FULLY_ASYNC in args.rollout_function_path:
        yield (
            f"--lora-sync adapter with --rollout-function-path {args.rollout_function_path}: SGLang unloads an adapter only when "
            "its requests have ended, and these never do; use --lora-sync merged"
        )
    if len(args.lora_adapters) > 1:
        yield from _against_several(args)


def _against_folders(args: argparse.Namespace) -> Iterator[str]:
    """Folders that were made with another rank or scaling than the run's."""
    for folder in args.lora_adapter_path.values():
        config = _adapter_config(folder)
        if config["r"] != args.lora_rank:
            yield f"--lora-adapter-path {folder}: its rank is {config['r']}, --lora-rank is {args.lora_rank}"
            continue
        scaling, theirs = args.lora_alpha / args.lora_rank, _alpha(config) / config["r"]
        if abs(theirs - scaling) > 1e-6 * scaling:
            yield (
                f"--lora-adapter-path {folder}: it is scaled by {theirs:g}, --lora-alpha {args.lora_alpha:g} / --lora-rank "
                f"{args.lora_rank} is {scaling:g}"
            )


def _against_experts(args: argparse.Namespace) -> Iterator[str]:
    """Layouts and engines on which adapters cannot train experts."""
    if not has_experts(args) or not set(args.target_modules) & {"gate_proj", "up_proj", "down_proj"}:
        return
    shown = f"--target-modules {' '.join(args.target_modules)}"
    parts = args.expert_tensor_parallel_size or args.tensor_model_parallel_size
    if args.lora_sync == "adapter" and args.rollout_engine == "sglang":
        yield (
            f"--lora-sync adapter with {shown}: SGLang is not known to add adapters to experts; leave gate_proj, up_proj and "
            "down_proj out, or use --lora-sync merged"
        )
    if parts > 1:
        yield f"--expert-tensor-parallel-size {parts} with {shown}: adapters of experts need whole experts, 1"
    if len(args.lora_adapters) > 1:
        yield (
            f"--lora-adapters {' '.join(args.lora_adapters)} with {shown}: only one adapter can train experts; leave the "
            "feed-forward projections out"
        )


def _against_several(args: argparse.Namespace) -> Iterator[str]:
    shown = f"--lora-adapters {' '.join(args.lora_adapters)}"
    if args.lora_sync != "adapter":
        yield f"{shown} needs --lora-sync adapter: one model cannot hold several merged ones"
    if args.save_hf:
        yield f"{shown} cannot be used with --save-hf, which merges; checkpoints hold each adapter in PEFT's format"
    if args.recompute_granularity == "selective" and args.pipeline_model_parallel_size > 1:
        yield f"{shown} with pipeline stages needs --recompute-granularity full, or none"
