"""Where weights come from and go to: --hf-checkpoint, --load, --ref-load, --save, and continuing a run.

A checkpoint folder is complete when ``latest_checkpointed_iteration.txt`` names an ``iter_NNNNNNN`` folder that holds
``manifest.json``. It reads no weights.
"""

from __future__ import annotations

import os
import time

from slime.config.model_shape import is_hf_folder, read_model_config
from slime.config.spec import UserError

TRACKER = "latest_checkpointed_iteration.txt"


def complete_iteration(folder: str | None) -> int | None:
    """Give the iteration of the newest complete checkpoint of a folder; None when there is none."""
    try:
        with open(os.path.join(folder or "", TRACKER), encoding="utf-8") as file:
            iteration = int(file.read().strip())
    except (OSError, ValueError):
        return None
    manifest = os.path.join(folder, f"iter_{iteration:07d}", "manifest.json")
    return iteration if os.path.isfile(manifest) else None


def resolve_checkpoints(run) -> None:
    """Derive hf_checkpoint (and read its config.json into model_arch), save, load and ref_load."""
    args = run.args
    _model_folder(args)
    _save_folder(run)
    if args.load is None and not args.no_resume:
        iteration = complete_iteration(args.save)
        if iteration is not None:
            args.load = args.save
            run.notes.append(f"continuing from iteration {iteration} in {args.save} (--no-resume starts over)")
    if args.no_resume:
        _fresh_folder(run)
    _start_point(run)
    _reference(run)


def _model_folder(args) -> None:
    """Find the Hugging Face folder: --hf-checkpoint, else --load, else --ref-load."""
    if args.hf_checkpoint is None:
        args.hf_checkpoint = next((path for path in (args.load, args.ref_load) if is_hf_folder(path)), None)
    if args.hf_checkpoint is None:
        raise UserError("--hf-checkpoint is missing: the folder of the model (config.json, tokenizer, weights)")
    args.model_arch = read_model_config(args.hf_checkpoint, "--hf-checkpoint")


def _save_folder(run) -> None:
    """A save interval without a folder saves into the run folder."""
    args = run.args
    if args.save_interval is not None and args.save is None:
        folder = os.path.join(args.run_dir, "checkpoints")
        run.assume("save", folder, f"checkpoints go to {folder}: --save-interval is given, --save is not")
    if args.save_hf and os.path.realpath(args.save_hf) == os.path.realpath(args.hf_checkpoint):
        raise UserError(f"--save-hf {args.save_hf} is the folder of --hf-checkpoint and would overwrite the model")


def _fresh_folder(run) -> None:
    """Keep an old run's checkpoints: --no-resume saves beside them."""
    args = run.args
    if complete_iteration(args.save) is None:
        return
    args.save = f"{args.save}-{time.strftime('%Y%m%d-%H%M%S')}"
    run.notes.append(f"--no-resume: an earlier run's checkpoints stay, this one saves to {args.save}")


def _start_point(run) -> None:
    """Find the weights to start from; anything but a checkpoint of this framework starts at round 0."""
    args = run.args
    if complete_iteration(args.load) is not None:
        if args.save and args.save != args.load and complete_iteration(args.save) is not None:
            run.notes.append(f"--save {args.save} holds checkpoints of an earlier run; newer ones join them")
        if args.finetune:  # weights only
            _weights_only(args)
        return
    if args.load and not is_hf_folder(args.load):
        _refuse_unknown_load(args)
        run.notes.append(f"--load {args.load} holds no checkpoint yet")
        args.load = None
    if args.load is None:
        args.load = args.ref_load or args.hf_checkpoint
        run.notes.append(f"starting from the weights in {args.load}")
    if not is_hf_folder(args.load):
        raise UserError(f"--ref-load {args.load}: not a Hugging Face folder (no config.json)")
    _weights_only(args)


def _weights_only(args) -> None:
    """Start at round 0 with fresh optimizer and random state."""
    args.no_load_optim = args.no_load_rng = args.finetune = True
    if args.start_rollout_id is None:
        args.start_rollout_id = 0


def _refuse_unknown_load(args) -> None:
    """Only a missing or empty folder that is also --save may be named by --load before the first checkpoint."""
    tracker = os.path.join(args.load, TRACKER)
    if os.path.exists(tracker):
        raise UserError(
            f"--load {args.load}: {TRACKER} is there, but no complete checkpoint of this framework (no manifest.json); "
            "convert a Megatron checkpoint to a Hugging Face folder first"
        )
    if args.load != args.save:
        raise UserError(f"--load {args.load}: neither a checkpoint ({TRACKER}) nor a Hugging Face folder (config.json)")


def _reference(run) -> None:
    """Find the reference weights where a KL term needs them: --ref-load, else the initial actor."""
    args = run.args
    needs_reference = (args.use_kl_loss or args.kl_coef != 0) and not args.debug_rollout_only
    if args.ref_load is None and needs_reference:
        folder = args.load if is_hf_folder(args.load) else args.hf_checkpoint
        run.assume("ref_load", folder, f"the reference of the KL term is the initial actor: {folder}")
    if args.ref_load is not None and not os.path.isdir(args.ref_load):
        raise UserError(f"--ref-load {args.ref_load}: no such folder")
    if needs_reference and not is_hf_folder(args.ref_load):
        raise UserError(f"--ref-load {args.ref_load}: not a Hugging Face folder (no config.json)")
