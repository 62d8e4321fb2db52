"""Who takes part in training, as data: which weights, which passes over a round's samples, what each writes.

A train role has processes, an optimizer and a place in the checkpoint of its own. A frozen role is a set of weights that is put in
place of the actor's for one forward pass. Which of them a run has follows from the flags alone, so that all ranks agree.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class TrainRole:
    """A model that is trained.

    with_value_head: it predicts values instead of tokens. metric_prefix: between `train/` and the name. time_prefix: of its
    timers. folder: of its state below a checkpoint directory.
    """

    name: str
    with_value_head: bool
    metric_prefix: str
    time_prefix: str
    folder: str


@dataclass(frozen=True)
class FrozenRole:
    """Weights that score responses: `tag` names their host copy, `<tag>_log_probs` is the column they write.

    is_needed: whether a run has them. source: (folder, step or None) that they are loaded from.
    """

    tag: str
    is_needed: Callable[[object], bool]
    source: Callable[[object], tuple[str, int | None]]


@dataclass(frozen=True)
class Pass:
    """One forward pass: the weights under `tag` write the columns `<prefix>log_probs` (a critic's pass: `values`)."""

    tag: str
    prefix: str = ""


TRAIN_ROLES = {
    "actor": TrainRole("actor", with_value_head=False, metric_prefix="", time_prefix="", folder=""),
    "critic": TrainRole(
        "critic", with_value_head=True, metric_prefix="critic-", time_prefix="critic_", folder="critic"
    ),
}

FROZEN_ROLES = (
    FrozenRole(
        "ref",
        is_needed=lambda args: args.kl_coef != 0 or args.use_kl_loss,
        source=lambda args: (args.ref_load or args.hf_checkpoint, args.ref_ckpt_step),
    ),
    FrozenRole(
        "teacher",
        is_needed=lambda args: args.use_opd and args.opd_type == "megatron",
        source=lambda args: (args.opd_teacher_load, args.opd_teacher_ckpt_step),
    ),
)

VALUES = Pass("critic")
_OLD = "old_actor "


def frozen_roles(args, role: TrainRole) -> list[FrozenRole]:
    """Return the frozen roles whose weights the ranks of a train role keep."""
    return [] if role.with_value_head else [frozen for frozen in FROZEN_ROLES if frozen.is_needed(args)]


def old_tag(version: int) -> str:
    """Return the tag of the weights that engines had as `version` (`--keep-old-actor`)."""
    return f"{_OLD}{version}"


def is_old(tag: str) -> bool:
    """Return whether a tag is one of `old_tag`."""
    return tag.startswith(_OLD)


def passes(args, role: TrainRole, old: str, reuses_forward: bool) -> list[Pass]:
    """Return the forward passes before the steps of a round, in their order.

    Args:
        old: tag of the weights of the old policy. reuses_forward: the first training forward gives its log-probs.
    """
    if role.with_value_head:
        return [VALUES]
    uses_advantages = args.loss_type == "custom_loss" and args.compute_advantages_and_returns
    if args.loss_type != "policy_loss" and not uses_advantages:
        return []
    planned = [Pass(frozen.tag, f"{frozen.tag}_") for frozen in frozen_roles(args, role)]
    recomputes = not args.use_rollout_logprobs or args.get_mismatch_metrics
    return [*planned, Pass(old)] if recomputes and not reuses_forward else planned
