"""Adam whose moments are zero before every step: a sign-like update without optimizer state.

With first-step moments m = (1-b1)*g and v = (1-b2)*g^2 the update is lr * m_hat / (sqrt(v_hat) + eps); with bias
correction that is lr * g / (|g| + eps).
"""

from __future__ import annotations

import torch


@torch.no_grad()
def stateless_adam_update(
    param: torch.Tensor,
    grad: torch.Tensor,
    *,
    lr: float,
    weight_decay: float = 0.0,
    eps: float = 1e-8,
    betas: tuple[float, float] = (0.9, 0.999),
    adamw: bool = True,
    bias_correction: bool = True,
) -> None:
    """Update `param` in place.

    Args:
        adamw: decoupled decay `param *= 1 - lr * weight_decay`; otherwise L2, added to the gradient.
        bias_correction: divide the moments by (1 - beta).
    """
    if adamw:
        param.mul_(1.0 - lr * weight_decay)
    else:
        grad = grad.add(param, alpha=weight_decay)
    first = 1.0 if bias_correction else 1.0 - betas[0]
    second = 1.0 if bias_correction else (1.0 - betas[1]) ** 0.5
    param.addcdiv_(grad * first, grad.abs().mul(second).add_(eps), value=-lr)
