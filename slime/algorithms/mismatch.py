"""How far the trainer's and the engine's log-probs of the same tokens are apart, as sums that any split of the data adds up to.

`mismatch_sums` runs on every rank; sums are added and the maximum is maximised over ranks; `mismatch_report` makes the numbers.
Every trained token counts once (masked ones never), so the numbers do not depend on ranks or micro-batches.
With d = train - rollout and w = exp(d), |d| bounded by 20:
    abs_diff, abs_diff_max   mean and maximum of |d|
    kl                       k1 estimate of KL(engine || trainer) from the engine's samples: mean of -d
    k3_kl                    the same with less variance and never negative: mean of exp(d) - 1 - d
    ess                      effective sample size of the weights w as a share of the tokens: (sum w)^2 / (n sum w^2), 1 = equal
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from slime.algorithms.numeric import bounded_log_ratio, masked

PREFIX = "train_rollout_"
NUM_SUMS = 6
MIN_ESS = 0.5
"""Below it half of the tokens carry the gradient of an importance-weighted loss: an alarm at any threshold."""


@torch.no_grad()
def mismatch_sums(
    train_log_probs: Sequence[torch.Tensor],
    rollout_log_probs: Sequence[torch.Tensor],
    loss_masks: Sequence[torch.Tensor],
) -> tuple[list[float], float]:
    """Return ([tokens, sum |d|, sum -d, sum k3, sum w, sum w^2], max |d|) of per-sample rows [L_i], in float64."""
    if not len(train_log_probs):
        return [0.0] * NUM_SUMS, 0.0
    train, rollout, mask = (torch.cat(list(rows)).double() for rows in (train_log_probs, rollout_log_probs, loss_masks))
    d = bounded_log_ratio(train, rollout)
    d = masked(d, mask)
    weights = masked(torch.exp(d), mask)
    terms = (mask, d.abs(), -d, masked(torch.expm1(d) - d, mask), weights, weights.square())
    largest = float(d.abs().max()) if len(d) else 0.0
    return [float(term.sum()) for term in terms], largest


def mismatch_report(sums: Sequence[float], largest: float) -> dict[str, float]:
    """Return the numbers of the module docstring by name, with the prefix `train_rollout_`; {} without a trained token."""
    tokens, absolute, kl, k3, weights, squares = sums
    if tokens == 0:
        return {}
    return {
        f"{PREFIX}logprob_abs_diff": absolute / tokens,
        f"{PREFIX}logprob_abs_diff_max": largest,
        f"{PREFIX}kl": kl / tokens,
        f"{PREFIX}k3_kl": k3 / tokens,
        f"{PREFIX}ess": weights * weights / (tokens * squares),
    }


def is_alarming(report: dict[str, float], threshold: float) -> bool:
    """Return whether the mean difference is above the threshold (0: never), or the effective sample size below a half."""
    if not report or threshold == 0:
        return False
    return report[f"{PREFIX}logprob_abs_diff"] > threshold or report[f"{PREFIX}ess"] < MIN_ESS
