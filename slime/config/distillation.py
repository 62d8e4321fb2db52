"""On-policy distillation: where the teacher's log-probs come from, and what has to be there."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator

from slime.config.checkpoint_paths import megatron_folder
from slime.config.model_shape import is_hf_folder

TEACHER_ON_ENGINE = "slime.rollout.on_policy_distillation"


def problems(args: argparse.Namespace, given: set[str]) -> Iterator[str]:
    """What stands against the distillation that was asked for."""
    teacher, step = args.opd_teacher_load, args.opd_teacher_ckpt_step
    if not args.use_opd:
        if teacher is not None:
            yield f"--opd-teacher-load {teacher}: there is no teacher without --use-opd"
        return
    if args.opd_type is None:
        yield "--use-opd needs --opd-type: sglang (log-probs come with the samples) or megatron (--opd-teacher-load)"
    elif args.opd_type == "sglang" and teacher is not None:
        yield f"--opd-teacher-load {teacher}: with --opd-type sglang the log-probs come with the samples"
    elif args.opd_type == "sglang" and (args.custom_rm_path or "").startswith(TEACHER_ON_ENGINE):
        yield from against_teacher_on_engine(args)
    elif args.opd_type == "megatron" and teacher is None:
        yield "--opd-type megatron needs --opd-teacher-load"
    elif args.opd_type == "megatron" and not os.path.exists(teacher):
        yield f"--opd-teacher-load {teacher}: no such folder"
    elif args.opd_type == "megatron" and not is_hf_folder(teacher) and megatron_folder(teacher, step) is None:
        yield f"--opd-teacher-load {teacher}: neither a Hugging Face folder nor a Megatron checkpoint"


def against_teacher_on_engine(args: argparse.Namespace) -> Iterator[str]:
    """An engine scores given tokens at temperature 1 over the whole vocabulary; student and teacher have to be alike."""
    if not args.rm_url:
        yield f"--opd-type sglang with {TEACHER_ON_ENGINE} needs --rm-url, the teacher's /generate"
    for flag, value in (
        ("--rollout-temperature", args.rollout_temperature),
        ("--rollout-top-p", args.rollout_top_p),
    ):
        if value != 1:
            yield (
                f"{flag} {value} with a teacher on an engine: it scores tokens at temperature 1 and among all tokens, "
                "the student's log-probs would be others even if it equalled the teacher; --opd-type megatron treats both alike"
            )
