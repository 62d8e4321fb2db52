"""On-policy distillation: pull the student towards a teacher on the student's own samples.

Works on top of any estimator, before whitening; neither log-prob receives gradient.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from slime.algorithms.numeric import working_precision


@torch.no_grad()
def apply_opd(
    advantages: Sequence[torch.Tensor],
    student_log_probs: Sequence[torch.Tensor] | None,
    teacher_log_probs: Sequence[torch.Tensor] | None,
    opd_kl_coef: float,
) -> tuple[list[torch.Tensor], list[torch.Tensor] | None]:
    """Return (advantages - coef * reverse_kl, reverse_kl = student - teacher), one [L_i] tensor per sample.

    Without student log-probs (the critic) the advantages come back unchanged and the second value is None.

    Raises:
        ValueError: the teacher's log-probs are missing or have another length than the student's.
    """
    if student_log_probs is None:
        return list(advantages), None
    if teacher_log_probs is None:
        raise ValueError("--use-opd: teacher_log_probs are missing from the rollout data")
    reverse_kl = []
    for row, (student, teacher) in enumerate(zip(student_log_probs, teacher_log_probs, strict=True)):
        if len(student) != len(teacher):
            raise ValueError(f"--use-opd: row {row} has {len(student)} student and {len(teacher)} teacher log-probs")
        student = working_precision(student)
        reverse_kl.append(student - teacher.to(student))
    return [a - opd_kl_coef * kl for a, kl in zip(advantages, reverse_kl, strict=True)], reverse_kl
