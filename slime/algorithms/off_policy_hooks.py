"""The off-policy corrections in the shape of `--custom-tis-function-path`.

Keyword call `(args, pg_loss, train_log_probs, rollout_log_probs, loss_masks, total_lengths, response_lengths)` ->
`(pg_loss, response_masks, metrics)`. `pg_loss` is flat [N]; the others are per-sample lists; metrics are flat [N].
The only file of this package that reads `args`: users select these functions by path.
"""

from __future__ import annotations

import torch

from slime.algorithms.mis import MisConfig, compute_mis
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


def mis_function(args, *, pg_loss, train_log_probs, rollout_log_probs, loss_masks, **_lengths):
    """Apply `mis.compute_mis`; options come from `args` as `--custom-config-path` put them there."""
    options = {name: vars(args)[name] for name in MisConfig.__dataclass_fields__ if name in vars(args)}
    output = compute_mis(train_log_probs, rollout_log_probs, loss_masks, MisConfig(**options))
    if output.weights is not None:
        pg_loss = pg_loss * torch.cat(output.weights)
    metrics = {f"mis_{name}": torch.cat(rows) for name, rows in output.metrics.items()}
    return pg_loss, output.response_masks, metrics
