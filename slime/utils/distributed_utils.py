"""Import path of process groups and whitening for users' functions; the code is in `slime.utils.process_groups` and `slime.algorithms`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from slime.algorithms.whitening import whiten
from slime.utils.process_groups import get_gloo_group, init_gloo_group, init_process_group, reduce_over

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["distributed_masked_whitening", "get_gloo_group", "init_gloo_group", "init_process_group"]


def distributed_masked_whitening(
    values: torch.Tensor,
    mask: torch.Tensor,
    process_group: ProcessGroup | None = None,
    shift_mean: bool = True,
    epsilon: float = 1e-8,
) -> torch.Tensor:
    """`values` less their mean over all unmasked ones of the group's ranks, over their standard deviation.

    Every rank of the group has to call it. The numbers are those of `--normalize-advantages`.

    Args:
        values, mask: [N] of this rank, N may be 0. process_group: None for all ranks. shift_mean: False keeps the mean.

    Raises: ValueError when nothing is unmasked on any rank.
    """
    total = reduce_over(process_group, dist.ReduceOp.SUM)
    (whitened,) = whiten([values], [mask], total, shift_mean=shift_mean, eps=epsilon)
    return whitened
