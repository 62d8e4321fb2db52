"""Unbiased estimate of pass@k: the chance that at least one of k samples of a prompt is correct.

Only a reward equal to 1 counts as correct. Source: Chen et al. (2021), "Evaluating Large Language Models Trained on
Code", eq. 1.
"""

from __future__ import annotations

from collections.abc import Sequence


def pass_at_k(groups: Sequence[Sequence[float]]) -> dict[str, float]:
    """Return {"pass@1": ..., "pass@2": ..., "pass@4": ...}, each the mean over the prompts with at least k samples.

    Args:
        groups: the rewards of each prompt's samples. Groups may differ in size; k runs over powers of two up to the
            largest one. With one sample per prompt there is no metric: it would be their mean.

    >>> pass_at_k([[1, 0], [0]])
    {'pass@1': 0.25, 'pass@2': 1.0}
    """
    largest = max((len(group) for group in groups), default=0)
    metrics = {}
    k = 1
    while k <= largest and largest > 1:
        rates = [_estimate(len(group), sum(reward == 1 for reward in group), k) for group in groups if len(group) >= k]
        metrics[f"pass@{k}"] = sum(rates) / len(rates)
        k *= 2
    return metrics


def _estimate(num_samples: int, num_correct: int, k: int) -> float:
    """Return 1 - C(n - c, k) / C(n, k) as a running product."""
    if num_samples - num_correct < k:
        return 1.0
    miss = 1.0
    for i in range(num_samples - num_correct + 1, num_samples + 1):
        miss *= 1.0 - k / i
    return 1.0 - miss
