"""The off-policy corrections in the shape of `--custom-tis-function-path`.

Keyword call `(args, pg_loss, train_log_probs, rollout_log_probs, loss_masks, total_lengths, response_lengths)` ->
`(pg_loss, response_masks, metrics)`. `pg_loss` is flat [N]; the others are per-sample lists; metrics are flat [N].
A function may have an attribute `step_sums(args)`: None, or a function `(train_log_probs, rollout_log_probs, loss_masks)
-> list of floats`. The trainer then calls it for all samples of an optimizer step, adds the lists over the ranks, and passes
the result to the function as `step_sums`. The only file of this package that reads `args`: users select these functions by path.
"""

from __future__ import annotations

from functools import partial

import torch

from slime.algorithms.mis import MisConfig, compute_mis, weight_sums
from slime.algorithms.off_policy import icepop_weights, tis_weights


def vanilla_tis_function(args, *, pg_loss, train_log_probs, rollout_log_probs, loss_masks, **_lengths):
    """Multiply the token loss by the truncated behaviour ratio (`--tis-clip-low`, `--tis-clip`)."""
    weights, metrics = tis_weights(
        torch.cat(list(train_log_probs)), torch.cat(list(rollout_log_probs)), args.tis_clip_low, args.tis_clip
    )
    return pg_loss * weights, loss_masks, metrics


def icepop_function(args, *, pg_loss, train_log_probs, rollout_log_probs, loss_masks, **_lengths):
    """Multiply by the ratio inside the bounds and drop the token outside (`--tis-clip-low`, `--tis-clip`)."""
    weights, metrics = icepop_weights(
        torch.cat(list(train_log_probs)), torch.cat(list(rollout_log_probs)), args.tis_clip_low, args.tis_clip
    )
    return pg_loss * weights, loss_masks, metrics


def mis_function(
    args, *, pg_loss, train_log_probs, rollout_log_probs, loss_masks, step_sums: list[float] | None = None, **_lengths
):
    """Apply `mis.compute_mis`; options come from `args` as `--custom-config-path` put them there."""
    output = compute_mis(train_log_probs, rollout_log_probs, loss_masks, _mis_config(args), step_sums)
    if output.weights is not None:
        pg_loss = pg_loss * torch.cat(output.weights)
    metrics = {f"mis_{name}": torch.cat(rows) for name, rows in output.metrics.items()}
    return pg_loss, output.response_masks, metrics


def _mis_config(args) -> MisConfig:
    return MisConfig(**{name: vars(args)[name] for name in MisConfig.__dataclass_fields__ if name in vars(args)})


def _mis_step_sums(args):
    """The mean that `tis_batch_normalize` divides by is one of the optimizer step."""
    config = _mis_config(args)
    return partial(weight_sums, config=config) if config.use_tis and config.tis_batch_normalize else None


mis_function.step_sums = _mis_step_sums
