"""Adam without memory in the place of the optimizer that Megatron built (`--use-stateless-adam`).

The same parameter groups, so Megatron's gradient handling and its learning-rate schedule work on it unchanged.
"""

from __future__ import annotations

import torch

from slime.algorithms.stateless_adam import stateless_adam_update
from slime.backends.megatron_utils import optimizer_fixes


class StatelessAdam(torch.optim.Optimizer):
    """Steps like Adam whose moments are zero before every step; has no state.

    Args:
        groups: parameter groups of an Adam, taken over as they are. decoupled: weight decay as in AdamW.

    Raises: ValueError for groups with amsgrad, and in `step` for sparse gradients.
    """

    def __init__(self, groups: list[dict], decoupled: bool):
        super().__init__([{"params": []}], {})
        self.param_groups = groups  # Megatron's shards are views, which the constructor would refuse
        self._decoupled = decoupled
        if any(group.get("amsgrad") for group in self.param_groups):
            raise ValueError("--use-stateless-adam: amsgrad needs moments")

    @torch.no_grad()
    def step(self, closure=None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                if parameter.grad.is_sparse:
                    raise ValueError("--use-stateless-adam: a gradient is sparse")
                stateless_adam_update(
                    parameter,
                    parameter.grad,
                    lr=group["lr"],
                    weight_decay=group["weight_decay"],
                    eps=group["eps"],
                    betas=group["betas"],
                    adamw=self._decoupled,
                )


def replace_adam(optimizer, decoupled: bool) -> None:
    """Put a StatelessAdam into every part of Megatron's optimizer."""
    for part in optimizer_fixes.parts(optimizer):
        if part.optimizer is not None:  # None on a rank where nothing is trained
            part.optimizer = StatelessAdam(part.optimizer.param_groups, decoupled)
