"""Per-token estimators of KL(policy || base) from samples of the policy.

With r = log_probs - base_log_probs: k1 = r; k2 = r^2 / 2; k3 = low_var_kl = exp(-r) - 1 + r.
Source: J. Schulman, "Approximating KL divergence" (2020). All results are elementwise and differentiable.
"""

from __future__ import annotations

import torch

from slime.algorithms.numeric import MAX_LOG_RATIO, bounded_log_ratio, working_precision

KL_KINDS = ("k1", "k2", "k3", "low_var_kl")


def approx_kl(
    log_probs: torch.Tensor,
    base_log_probs: torch.Tensor,
    kind: str,
    importance_log_ratio: torch.Tensor | None = None,
) -> torch.Tensor:
    """Estimate the KL divergence of every token.

    Args:
        log_probs: policy log-probs, any shape.
        base_log_probs: log-probs of the reference, same shape; no gradient flows into them.
        kind: one of KL_KINDS. `low_var_kl` is `k3` clamped to [-10, 10] at the very end.
        importance_log_ratio: `log_probs - old_log_probs` for the unbiased form; its exp multiplies the estimate and
            carries gradient.
    Raises:
        ValueError: unknown kind.
    """
    r = working_precision(log_probs) - working_precision(base_log_probs).detach()
    if kind == "k1":
        kl = r
    elif kind == "k2":
        kl = r.square() / 2
    elif kind in ("k3", "low_var_kl"):
        kl = torch.exp((-r).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)) - 1 + r
    else:
        raise ValueError(f"--kl-loss-type {kind!r} is unknown; choose one of {', '.join(KL_KINDS)}")
    if importance_log_ratio is not None:
        kl = importance_ratio(importance_log_ratio) * kl
    return kl.clamp(-10.0, 10.0) if kind == "low_var_kl" else kl


def importance_ratio(log_ratio: torch.Tensor) -> torch.Tensor:
    """Return exp(log_ratio), bounded so that it stays finite."""
    return torch.exp(bounded_log_ratio(log_ratio, torch.zeros_like(log_ratio)))
