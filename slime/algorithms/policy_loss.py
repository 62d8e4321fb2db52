"""Token losses of the policy gradient: PPO clip, dual clip, GSPO sequence ratio, CISPO, and OPSM masks.

`policy_loss(...)` is what the trainer calls per micro-batch; the rest are its parts. With
`ppo_kl = old_log_probs - log_probs` the ratio is exp(-ppo_kl). Log-ratios are bounded (`numeric.bounded_log_ratio`), so
no stored log-prob can produce inf or NaN. Old log-probs and advantages never receive gradient.

Order in the trainer: policy_loss -> opsm keep mask -> TIS -> reducer -> entropy -> KL.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from slime.algorithms.numeric import MAX_LOG_RATIO, bounded_log_ratio, identity, masked

Reduce = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class PolicyLossOutput:
    """loss [N] token losses with gradient; clipfrac [N] and ppo_kl [N] detached metrics (N = all tokens, flat)."""

    loss: torch.Tensor
    clipfrac: torch.Tensor
    ppo_kl: torch.Tensor


def policy_loss(
    estimator: str,
    log_probs: Sequence[torch.Tensor],
    old_log_probs: Sequence[torch.Tensor],
    advantages: Sequence[torch.Tensor],
    loss_masks: Sequence[torch.Tensor],
    *,
    eps_clip: float,
    eps_clip_high: float,
    eps_clip_c: float | None = None,
    reduce_sum: Reduce | None = None,
) -> PolicyLossOutput:
    """Return the token losses of one micro-batch.

    Args:
        estimator: `gspo` uses the sequence ratio, `cispo` the stop-gradient ratio, every other name the PPO clip.
        log_probs, old_log_probs, advantages, loss_masks: one [L_i] tensor per sample (local slices under CP).
        eps_clip_c: dual clip bound, > 1; None turns it off. Not used by cispo.
        reduce_sum: sum over the CP ranks of the samples, differentiable; needed by gspo when responses are sliced.
    """
    flat_log_probs = torch.cat(list(log_probs))
    flat_advantages = torch.cat(list(advantages)).detach()
    flat_old = torch.cat(list(old_log_probs)).detach()
    if estimator == "gspo":
        ppo_kl = expand_rows(sequence_kl(log_probs, old_log_probs, loss_masks, reduce_sum), log_probs)
    else:
        ppo_kl = -bounded_log_ratio(flat_log_probs, flat_old)
    if estimator == "cispo":
        loss, clipfrac = cispo_loss(ppo_kl, flat_log_probs, flat_advantages, eps_clip, eps_clip_high)
    else:
        loss, clipfrac = ppo_clip_loss(ppo_kl, flat_advantages, eps_clip, eps_clip_high, eps_clip_c)
    return PolicyLossOutput(loss, clipfrac, ppo_kl.detach())


def ppo_clip_loss(
    ppo_kl: torch.Tensor,
    advantages: torch.Tensor,
    eps_clip: float,
    eps_clip_high: float,
    eps_clip_c: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (loss, clip fraction) per token: max(-ratio*A, -clip(ratio)*A), and min(., -c*A) where A < 0.

    Source: Schulman et al. (2017); asymmetric bounds from DAPO (2025); dual clip from Ye et al. (2020).

    Raises:
        ValueError: eps_clip_c is not greater than 1.
    """
    if eps_clip_c is not None and eps_clip_c <= 1:
        raise ValueError(f"--eps-clip-c must be greater than 1, got {eps_clip_c}")
    ratio = torch.exp(-ppo_kl)
    plain = -ratio * advantages
    clipped = -ratio.clamp(1.0 - eps_clip, 1.0 + eps_clip_high) * advantages
    loss = torch.maximum(plain, clipped)
    clipfrac = (clipped > plain).to(loss.dtype).detach()
    if eps_clip_c is not None:
        loss = torch.where(advantages < 0, torch.minimum(loss, -eps_clip_c * advantages), loss)
    return loss, clipfrac


def cispo_loss(
    ppo_kl: torch.Tensor, log_probs: torch.Tensor, advantages: torch.Tensor, eps_clip: float, eps_clip_high: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (loss, clip fraction) per token: -stopgrad(clip(ratio)) * A * log_prob.

    Clipped tokens keep their gradient. Source: MiniMax-M1 (2025), eq. 4-5.
    """
    ratio = torch.exp(-ppo_kl).detach()
    clipped = ratio.clamp(1.0 - eps_clip, 1.0 + eps_clip_high)
    return -clipped * advantages * log_probs, (clipped != ratio).to(ratio.dtype)


def sequence_kl(
    log_probs: Sequence[torch.Tensor],
    old_log_probs: Sequence[torch.Tensor],
    loss_masks: Sequence[torch.Tensor],
    reduce_sum: Reduce | None = None,
) -> torch.Tensor:
    """Return the masked mean of (old - new) log-probs of each sample, [B], with gradient into `log_probs`.

    Source: GSPO (2025) eq. 7: the sequence ratio is exp of minus this. A fully masked sample gives 0.
    """
    rows = [
        torch.stack([masked(-bounded_log_ratio(new, old.detach()), mask).sum(), mask.sum().to(new.dtype)])
        for new, old, mask in zip(log_probs, old_log_probs, loss_masks, strict=True)
    ]
    sums = (reduce_sum or identity)(torch.stack(rows))
    return (sums[:, 0] / sums[:, 1].clamp(min=1.0)).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def expand_rows(per_sample: torch.Tensor, rows: Sequence[torch.Tensor]) -> torch.Tensor:
    """Repeat one value per sample [B] for each of its tokens, flat [N]."""
    return torch.cat([value.expand(len(row)) for value, row in zip(per_sample, rows, strict=True)])


def opsm(seq_kl: torch.Tensor, advantages: Sequence[torch.Tensor], delta: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Off-policy sequence masking: drop tokens with negative advantage in samples that drifted further than delta.

    Args:
        seq_kl: [B] from `sequence_kl`.
    Returns:
        (keep mask flat [N], clip fraction flat [N] = 1 - keep, to be reduced like any other per-token metric).
    """
    flat = torch.cat(list(advantages))
    dropped = (flat < 0) & (expand_rows(seq_kl.detach(), advantages) > delta)
    return (~dropped).to(flat.dtype), dropped.to(flat.dtype)
