"""Importance sampling and rejection against train/rollout mismatch, with configurable level, bounds and metrics.

Per sample, with d = train - rollout log-probs: the log weight is d (token), its masked sum (sequence) or its masked
mean (geometric); it is clamped to [-20, 20] before exp. Weights act on the loss, rejection on the response mask;
rejected tokens leave the numerator only, denominators keep the original mask sums.
Full responses are expected (gathered over CP first). Source: Yao et al. (2025), "Your efficient RL framework secretly
brings you off-policy RL training"; Liu et al. (2025) on geometric masking and vetoes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from slime.algorithms.numeric import MAX_LOG_RATIO, bounded_log_ratio, masked

LEVELS = ("token", "sequence", "geometric")
MODES = ("truncate", "clip", "mask")
Rows = list[torch.Tensor]


@dataclass(frozen=True)
class MisConfig:
    """Options of the correction; the names are those of the YAML that `--custom-config-path` reads."""

    use_tis: bool = True
    use_rs: bool = False
    tis_level: str = "token"
    rs_level: str = "token"
    tis_mode: str = "truncate"
    tis_lower_bound: float | None = None
    tis_upper_bound: float = 2.0
    rs_lower_bound: float | None = None
    rs_upper_bound: float | None = None
    rs_veto_threshold: float | None = None
    tis_batch_normalize: bool = False

    def __post_init__(self):
        for name, value, allowed in (
            ("tis_level", self.tis_level, LEVELS), ("rs_level", self.rs_level, LEVELS), ("tis_mode", self.tis_mode, MODES),
        ):  # fmt: skip
            if value not in allowed:
                raise ValueError(f"{name} {value!r} is unknown; choose one of {', '.join(allowed)}")
        if self.tis_batch_normalize and self.tis_level == "geometric":
            raise ValueError("tis_batch_normalize does not support tis_level geometric")

    @property
    def tis_bounds(self) -> tuple[float, float]:
        low = 1.0 / self.tis_upper_bound if self.tis_lower_bound is None else self.tis_lower_bound
        return low, self.tis_upper_bound

    @property
    def rs_bounds(self) -> tuple[float, float]:
        low, high = self.tis_bounds
        return (
            low if self.rs_lower_bound is None else self.rs_lower_bound,
            high if self.rs_upper_bound is None else self.rs_upper_bound,
        )


@dataclass(frozen=True)
class MisOutput:
    """weights: [L_i] per sample, or None without use_tis; response_masks: [L_i] float; metrics: name -> [L_i] rows."""

    weights: Rows | None
    response_masks: Rows
    metrics: dict[str, Rows]


@torch.no_grad()
def compute_mis(
    train_log_probs: Sequence[torch.Tensor],
    rollout_log_probs: Sequence[torch.Tensor],
    loss_masks: Sequence[torch.Tensor],
    config: MisConfig,
    sums: Sequence[float] | None = None,
) -> MisOutput:
    """Return weights, masks and metrics (without the `mis_` prefix) of a micro-batch.

    Args:
        sums: `weight_sums` of the whole batch that `tis_batch_normalize` means; None when these rows are all of it.
    """
    metrics: dict[str, Rows] = {}
    differences = []
    for train, rollout in zip(train_log_probs, rollout_log_probs, strict=True):
        differences.append(bounded_log_ratio(train, rollout))
        for name, value in mismatch_metrics(train, rollout, loss_masks[len(differences) - 1]).items():
            metrics.setdefault(name, []).append(value)
    masks = [mask.to(d.dtype) for mask, d in zip(loss_masks, differences, strict=True)]
    weights = None
    response_masks = masks
    if config.use_tis:
        weights, response_masks = _bounded_weights(differences, masks, config, metrics)
    if config.use_rs:
        response_masks = [
            kept * rs
            for kept, rs in zip(response_masks, _rejection_masks(differences, masks, config, metrics), strict=True)
        ]
    if weights is not None:
        _log(metrics, "is_ratio_mean_after_tis_rs", [w * m for w, m in zip(weights, response_masks, strict=True)])
        if config.tis_batch_normalize:
            weights = _batch_normalize(weights, sums or _sums_of(weights, masks, config.tis_level), metrics)
        _final_statistics(weights, masks, metrics)
    return MisOutput(weights, response_masks, metrics)


def sequence_weight(difference: torch.Tensor, mask: torch.Tensor, level: str) -> torch.Tensor:
    """Return the unbounded weights [L] of one sample at the given level."""
    if level == "token":
        log_weight = difference
    else:
        log_weight = masked(difference, mask).sum()
        if level == "geometric":
            log_weight = log_weight / mask.sum().clamp(min=1)
    return torch.exp(log_weight.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)).expand_as(difference)


@torch.no_grad()
def weight_sums(
    train_log_probs: Sequence[torch.Tensor],
    rollout_log_probs: Sequence[torch.Tensor],
    loss_masks: Sequence[torch.Tensor],
    config: MisConfig,
) -> list[float]:
    """Return what batch normalisation divides, [sum, count] of bounded weights (or of their means per sample).

    The lists of any parts of a batch add up to the batch's.
    """
    differences = [bounded_log_ratio(*pair) for pair in zip(train_log_probs, rollout_log_probs, strict=True)]
    masks = [mask.to(d.dtype) for mask, d in zip(loss_masks, differences, strict=True)]
    weights, _ = _bounded_weights(differences, masks, config, {})
    return _sums_of(weights, masks, config.tis_level)


def _sums_of(weights: Rows, masks: Rows, level: str) -> list[float]:
    totals = [(float(w.double().sum()), float(m.sum())) for w, m in zip(weights, masks, strict=True)]
    if level == "sequence":
        totals = [(total / count, 1.0) for total, count in totals if count]
    return [sum(total for total, _ in totals), sum(count for _, count in totals)]


def _bounded_weights(differences: Rows, masks: Rows, config: MisConfig, metrics: dict[str, Rows]) -> tuple[Rows, Rows]:
    low, high = config.tis_bounds
    raw = [sequence_weight(d, m, config.tis_level) for d, m in zip(differences, masks, strict=True)]
    below, above = [(w < low).to(w.dtype) for w in raw], [(w > high).to(w.dtype) for w in raw]
    _log(metrics, "tis_weight_before_bound", raw)
    response_masks = masks
    if config.tis_mode == "truncate":
        weights = [w.clamp(max=high) for w in raw]
        _log(metrics, "tis_truncate_fraction", above)
    elif config.tis_mode == "clip":
        weights = [w.clamp(low, high) for w in raw]
        _log(metrics, "tis_clip_fraction_low", below)
        _log(metrics, "tis_clip_fraction_high", above)
    else:
        weights = raw
        response_masks = [m * (1 - lo) * (1 - hi) for m, lo, hi in zip(masks, below, above, strict=True)]
        _log(metrics, "tis_mask_fraction_low", below)
        _log(metrics, "tis_mask_fraction_high", above)
    _log(metrics, "tis_weight_after_bound", weights)
    return [masked(w, m) for w, m in zip(weights, masks, strict=True)], response_masks


def _rejection_masks(differences: Rows, masks: Rows, config: MisConfig, metrics: dict[str, Rows]) -> Rows:
    low, high = config.rs_bounds
    raw = [sequence_weight(d, m, config.rs_level) for d, m in zip(differences, masks, strict=True)]
    below, above = [(w < low).to(w.dtype) for w in raw], [(w > high).to(w.dtype) for w in raw]
    _log(metrics, "rs_mask_fraction_low", below)
    _log(metrics, "rs_mask_fraction_high", above)
    kept = [m * (1 - lo) * (1 - hi) for m, lo, hi in zip(masks, below, above, strict=True)]
    if config.rs_veto_threshold is None:
        return kept
    limit = torch.tensor(config.rs_veto_threshold).log().item()
    catastrophic = [((d < limit) & (m > 0)).to(d.dtype) for d, m in zip(differences, masks, strict=True)]
    vetoed = [c.any().to(c.dtype).expand_as(c) for c in catastrophic]
    _log(metrics, "rs_catastrophic_token_fraction", catastrophic)
    _log(metrics, "rs_catastrophic_seq_fraction", vetoed)
    return [k * (1 - v) for k, v in zip(kept, vetoed, strict=True)]


def _batch_normalize(weights: Rows, sums: Sequence[float], metrics: dict[str, Rows]) -> Rows:
    total, count = sums
    factor = count / total if total > 0 else 1.0
    _log(metrics, "batch_norm_factor", [torch.full_like(w, factor) for w in weights])
    return [w * factor for w in weights]


def _final_statistics(weights: Rows, masks: Rows, metrics: dict[str, Rows]) -> None:
    _log(metrics, "is_ratio_mean_final", weights)
    for name, pick in (("is_ratio_min_final", torch.amin), ("is_ratio_max_final", torch.amax)):
        rows = [
            pick(w[m > 0]).expand_as(w) if m.any() else torch.zeros_like(w) for w, m in zip(weights, masks, strict=True)
        ]
        _log(metrics, name, rows)


def _log(metrics: dict[str, Rows], name: str, rows: Rows) -> None:
    metrics[name] = list(rows)


@torch.no_grad()
def mismatch_metrics(
    train_log_probs: torch.Tensor, rollout_log_probs: torch.Tensor, loss_mask: torch.Tensor
) -> dict[str, torch.Tensor]:
    """Return the mismatch metrics of one sample, each as [L] so that the usual reducer applies.

    kl = rollout - train per token; k3_kl its k3 form; perplexities from masked means; chi2_token = w^2 - 1;
    chi2_seq = exp(2 * clamp(sum d)) - 1.
    """
    train, rollout = train_log_probs.detach(), rollout_log_probs.detach()
    difference = bounded_log_ratio(train, rollout)
    count = loss_mask.sum().clamp(min=1)
    train_log_ppl = -masked(train, loss_mask).sum() / count
    rollout_log_ppl = -masked(rollout, loss_mask).sum() / count
    gap = train_log_ppl - rollout_log_ppl
    sequence = masked(difference, loss_mask).sum().clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    per_sample = {
        "training_log_ppl": train_log_ppl,
        "training_ppl": train_log_ppl.exp(),
        "rollout_log_ppl": rollout_log_ppl,
        "rollout_ppl": rollout_log_ppl.exp(),
        "log_ppl_diff": gap,
        "log_ppl_abs_diff": gap.abs(),
        "ppl_ratio": gap.exp(),
        "chi2_seq": torch.exp(2 * sequence) - 1,
    }
    per_token = {
        "kl": -difference,
        "k3_kl": torch.exp(difference) - difference - 1,
        "chi2_token": torch.exp(2 * difference) - 1,
    }
    return {name: value.expand_as(difference) for name, value in per_sample.items()} | per_token
