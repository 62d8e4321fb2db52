"""Where weights come from and go to: --hf-checkpoint, --load, --ref-load, --save, and continuing a run.

The same command line starts a run and, when it was interrupted, continues it: a complete checkpoint below --save that this
command wrote wins over what --load names. It reads no weights.
"""

from __future__ import annotations

import glob
import os
import time
import uuid

from slime.config import checkpoint_dirs as dirs
from slime.config.model_shape import is_hf_folder, read_model_config
from slime.config.spec import UserError


def resolve_checkpoints(run) -> None:
    """Derive hf_checkpoint (and read its config.json into model_arch), save, load, ref_load, and how the run starts.

    Also sets resume_from (the checkpoint directory to continue, or None), run_id and started_from (see
    checkpoint_dirs.Checkpoint).
    """
    args = run.args
    _model_folder(args)
    _save_folder(run)
    args.resume_from, args.run_id, args.started_from = None, uuid.uuid4().hex[:12], args.load
    if args.no_resume:
        _fresh_folder(run)
    found = _interrupted(run) or _named_by_load(run)
    if found is not None:
        _continue(run, found)
    else:
        _start_point(run)
    _reference(run, found.started_from if found else args.load)


def _model_folder(args) -> None:
    """Find the Hugging Face folder: --hf-checkpoint, else --load, else --ref-load."""
    if args.hf_checkpoint is None:
        args.hf_checkpoint = next((path for path in (args.load, args.ref_load) if is_hf_folder(path)), None)
    if args.hf_checkpoint is None:
        raise UserError("--hf-checkpoint is missing: the folder of the model (config.json, tokenizer, weights)")
    args.model_arch = read_model_config(args.hf_checkpoint, "--hf-checkpoint")


def _save_folder(run) -> None:
    """Save into the run folder when saving is asked for without --save, or a run of that name saved there before."""
    args = run.args
    if args.save_hf and os.path.realpath(args.save_hf) == os.path.realpath(args.hf_checkpoint):
        raise UserError(f"--save-hf {args.save_hf} is the folder of --hf-checkpoint and would overwrite the model")
    if args.save is not None:
        if args.save_interval is None:
            run.notes.append("--save without --save-interval: one checkpoint, after the last round")
        return
    folder = os.path.join(args.run_dir, "checkpoints")
    asking = next((f for f in ("save_interval", "save_hf", "save_keep_last") if getattr(args, f) is not None), None)
    if asking is not None:
        flag = "--" + asking.replace("_", "-")
        run.assume("save", folder, f"checkpoints go to {folder}: {flag} is given, --save is not")
    elif dirs.all_complete(folder):
        run.assume("save", folder, f"checkpoints go to {folder}, where the earlier run of this name has its own")


def _fresh_folder(run) -> None:
    """Keep an old run's checkpoints: --no-resume saves beside them, and does not continue them through --load either."""
    args = run.args
    if args.save is None or dirs.latest(args.save) is None:
        return
    if args.load == args.save:
        args.load = None
    args.save = f"{args.save}-{time.strftime('%Y%m%d-%H%M%S')}"
    run.notes.append(f"--no-resume: an earlier run's checkpoints stay, this one saves to {args.save}")


def _interrupted(run) -> dirs.Checkpoint | None:
    """What this very command saved before it was interrupted: --save holds a checkpoint that began with the same --load."""
    args = run.args
    if args.no_resume or args.ckpt_step is not None:
        return None
    if args.finetune and args.load is not None and args.load == args.save:
        return None
    found = dirs.latest(args.save)
    if found is None:
        return None
    if args.load in (None, args.save, found.started_from):
        args.started_from = found.started_from
        if args.load != args.save:  # flags about the first start, not about this continuation
            args.finetune = args.no_load_optim = args.no_load_rng = False
        return found
    run.notes.append(f"--save {args.save} holds checkpoints of an earlier run; newer ones join them")
    return None


def _named_by_load(run) -> dirs.Checkpoint | None:
    """The checkpoint of this framework that --load names; only its weights count with --finetune."""
    args = run.args
    folder, step = args.load or args.save, args.ckpt_step
    if step is None:
        found = dirs.latest(args.load)
    elif folder is None:
        raise UserError(f"--ckpt-step {step} needs --load or --save: the folder with the checkpoint of that round")
    else:
        found = dirs.at_round(folder, step)
        if found is None and megatron_folder(folder, step) is None:
            raise UserError(f"--ckpt-step {step}: {folder} holds no complete checkpoint of that round")
    if found is None or not args.finetune:
        return found
    dirs.check_model(found, args.model_arch, found.precision, args.hf_checkpoint)
    run.notes.append(f"--finetune: starting at round 0 from the weights in {found.directory}")
    return None


def _continue(run, found: dirs.Checkpoint) -> None:
    """Go on from a checkpoint."""
    args = run.args
    dirs.check_model(found, args.model_arch, args.precision, args.hf_checkpoint)
    folder = os.path.dirname(found.directory)
    if args.use_critic and not os.path.isfile(os.path.join(found.directory, "critic", "metadata.json")):
        raise UserError(
            f"--advantage-estimator ppo: {found.directory} holds no critic, so it cannot be continued; --load with --finetune "
            "starts at round 0 from its weights"
        )
    args.load, args.resume_from, args.run_id = folder, found.directory, found.run_id
    run.notes.append(
        f"continuing from {found.directory}: round {found.rollout_id} is trained (--no-resume starts over)"
    )
    for name in sorted(dirs.cut_short(folder)):
        run.notes.append(f"warning: {name} was cut short and is ignored")


def _start_point(run) -> None:
    """Find the weights to start from; round 0 comes next."""
    args = run.args
    for name in sorted(dirs.cut_short(args.save)) if args.save else ():
        run.notes.append(f"warning: {name} was cut short and is ignored")
    if args.load and not is_hf_folder(args.load):
        if args.load == args.save and not os.path.exists(os.path.join(args.load, dirs.TRACKER)):
            run.notes.append(f"--load {args.load} holds no checkpoint yet")
            args.load = args.started_from = None
        elif megatron_folder(args.load, args.ckpt_step) is None:
            raise UserError(
                f"--load {args.load}: neither a Hugging Face folder (config.json) nor a complete checkpoint "
                f"({dirs.TRACKER}, iter_NNNNNNN/metadata.json)"
            )
    if args.load is None:
        args.load = args.ref_load or args.hf_checkpoint
        if args.ref_load is not None and args.ref_ckpt_step is not None:
            args.ckpt_step = args.ref_ckpt_step
        run.notes.append(f"starting from the weights in {args.load}")
    if not is_hf_folder(args.load) and megatron_folder(args.load, args.ckpt_step) is None:
        raise UserError(f"--ref-load {args.load}: not a Hugging Face folder (no config.json)")
    args.no_load_optim = args.no_load_rng = args.finetune = True
    if args.start_rollout_id is None:
        args.start_rollout_id = 0


def megatron_folder(folder: str, step: int | None) -> str | None:
    """The torch_dist directory whose weights a folder gives: itself, or what its tracker file or a step names."""
    if glob.glob(os.path.join(glob.escape(folder), "metadata.json")):
        return folder
    number = step if step is not None else dirs.tracked_round(folder)
    if number is None and not dirs.tracks_release(folder):
        return None
    directory = os.path.join(folder, dirs.RELEASE if number is None else dirs.name_of(number))
    return directory if os.path.isfile(os.path.join(directory, "metadata.json")) else None


def _reference(run, start: str | None) -> None:
    """Find the reference weights where a KL term needs them: --ref-load, else the initial actor."""
    args = run.args
    needs_reference = (args.use_kl_loss or args.kl_coef != 0) and not args.debug_rollout_only
    if args.ref_load is None and needs_reference:
        folder = start if is_hf_folder(start) else args.hf_checkpoint
        whose = "the initial actor" if folder == start else "the model of --hf-checkpoint (--ref-load names another)"
        run.assume("ref_load", folder, f"the reference of the KL term is {whose}: {folder}")
    if args.ref_load is not None and not os.path.isdir(args.ref_load):
        raise UserError(f"--ref-load {args.ref_load}: no such folder")
    if (
        needs_reference
        and not is_hf_folder(args.ref_load)
        and megatron_folder(args.ref_load, args.ref_ckpt_step) is None
    ):
        raise UserError(f"--ref-load {args.ref_load}: neither a Hugging Face folder nor a Megatron checkpoint")
