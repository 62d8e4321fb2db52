"""Weights of tokens that are off-policy, and how token losses are averaged.

--use-tis --custom-tis-function-path examples/hooks/off_policy.py:drop_far_tokens
--custom-pg-loss-reducer-function-path examples/hooks/off_policy.py:per_longest
"""

import torch


def drop_far_tokens(*, args, pg_loss, train_log_probs, rollout_log_probs, loss_masks, **kwargs):
    """Leave out tokens whose probability differs by more than a factor of --tis-clip between trainer and engine.

    Per sample: log-probs and masks; `pg_loss` is one tensor of all tokens. Returns losses, masks, and metrics by token.
    """
    ratio = torch.exp(torch.cat(train_log_probs) - torch.cat(rollout_log_probs))
    near = (ratio < args.tis_clip) & (ratio > 1 / args.tis_clip)
    return pg_loss * ratio * near, loss_masks, {"tis": ratio}


def per_longest(total_lengths, response_lengths, loss_masks, calculate_per_token_loss):
    """Divide every sample's sum by the longest response of the micro-batch: a token counts the same in each of them."""
    masks, longest = torch.cat(loss_masks), max(response_lengths)
    return lambda pg_loss: (pg_loss * masks).sum() / longest
