"""Import path of the formulas for users' advantage and loss functions, in the field's signatures; the code is in `slime.algorithms`.

Rows are per-sample lists of [L_i] tensors.
"""

from __future__ import annotations

import torch

from slime.algorithms import advantages as _advantages
from slime.algorithms import policy_loss as _policy_loss
from slime.algorithms.kl import approx_kl
from slime.algorithms.logprobs import log_probs_and_entropy
from slime.algorithms.policy_loss import cispo_loss as compute_cispo_loss
from slime.algorithms.policy_loss import ppo_clip_loss as compute_policy_loss
from slime.utils.process_groups import reduce_over

__all__ = [
    "calculate_log_probs_and_entropy", "chunked_gae", "compute_approx_kl", "compute_cispo_loss", "compute_gspo_kl",
    "compute_log_probs",
    "compute_opsm_mask", "compute_policy_loss", "get_advantages_and_returns", "get_advantages_and_returns_batch",
    "get_grpo_returns", "get_reinforce_plus_plus_baseline_advantages", "get_reinforce_plus_plus_returns", "vanilla_gae",
]  # fmt: skip

Rows = list[torch.Tensor]


def compute_approx_kl(log_probs, log_probs_base, kl_loss_type: str, importance_ratio=None) -> torch.Tensor:
    """KL of each token; `importance_ratio` (new over old probability) multiplies it for the unbiased form."""
    log_ratio = None if importance_ratio is None else torch.log(importance_ratio)
    return approx_kl(log_probs, log_probs_base, kl_loss_type, log_ratio)


def compute_gspo_kl(
    full_log_probs: Rows, full_old_log_probs: Rows, local_log_probs: Rows, loss_masks: Rows
) -> torch.Tensor:
    """The sequence's mean of old minus new log-probs, repeated for each of its tokens, flat."""
    return _policy_loss.expand_rows(
        _policy_loss.sequence_kl(full_log_probs, full_old_log_probs, loss_masks), local_log_probs
    )


def compute_opsm_mask(
    args, full_log_probs: Rows, full_old_log_probs: Rows, advantages: Rows, loss_masks: Rows
) -> tuple:
    """(flat mask of what stays, flat share of what is dropped) under `--opsm-delta`."""
    seq_kl = _policy_loss.sequence_kl(full_log_probs, full_old_log_probs, loss_masks)
    return _policy_loss.opsm(seq_kl, advantages, args.opsm_delta)


def get_grpo_returns(rewards: torch.Tensor, kl: Rows) -> Rows:
    """Each sample's reward on each of its tokens."""
    return [torch.ones_like(row) * reward for reward, row in zip(rewards, kl, strict=True)]


def get_reinforce_plus_plus_returns(
    rewards, kl: Rows, loss_masks: Rows, response_lengths, total_lengths=None, kl_coef: float = 0.0, gamma: float = 1.0
) -> Rows:
    inputs = _advantages.AdvantageInputs(rewards, response_lengths, loss_masks, kl, kl_coef=kl_coef, gamma=gamma)
    return _advantages.reinforce_plus_plus(inputs)[1]


def get_reinforce_plus_plus_baseline_advantages(rewards, kl: Rows, loss_masks: Rows, kl_coef: float) -> Rows:
    inputs = _advantages.AdvantageInputs(rewards, [len(row) for row in kl], loss_masks, kl, kl_coef=kl_coef)
    return _advantages.reinforce_plus_plus_baseline(inputs)[0]


def get_advantages_and_returns(total_len, response_len, values, rewards, gamma: float, lambd: float) -> tuple:
    """GAE of one response: (advantages [L], returns [L]) from values [L] and token rewards [L]."""
    advantages, returns = _advantages.gae([rewards], [values], gamma, lambd)
    return advantages[0], returns[0]


def get_advantages_and_returns_batch(
    total_lengths,
    response_lengths,
    values_list: Rows,
    rewards_list: Rows,
    gamma: float,
    lambd: float,
    chunked: bool = True,
) -> tuple[Rows, Rows]:
    """The same for many; `chunked` chose between two ways to the same result."""
    return _advantages.gae(rewards_list, values_list, gamma, lambd)


def chunked_gae(
    rewards: torch.Tensor, values: torch.Tensor, gamma: float, lambd: float, chunk_size: int = 128
) -> tuple[torch.Tensor, torch.Tensor]:
    """GAE of rows of one length: (advantages [B, T], returns [B, T]) from [B, T]; `chunk_size` changes no number."""
    advantages, returns = _advantages.gae(list(rewards), list(values), gamma, lambd)
    return torch.stack(advantages), torch.stack(returns)


def vanilla_gae(rewards: torch.Tensor, values: torch.Tensor, gamma: float, lambd: float) -> tuple:
    return chunked_gae(rewards, values, gamma, lambd)


def calculate_log_probs_and_entropy(
    logits: torch.Tensor, tokens: torch.Tensor, tp_group=None, with_entropy: bool = False, chunk_size: int = -1
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(log-probs [T, 1], entropies [T] or None) of tokens [T] under logits [T, V / tp], with gradient.

    Args:
        tp_group: the ranks that hold the vocabulary's parts, in order; None: all of it is here.
    """
    start, reduce_max, reduce_sum = _vocabulary_part(logits, tp_group)
    log_probs, entropy = log_probs_and_entropy(
        logits, tokens, chunk_size=chunk_size, with_entropy=with_entropy, entropy_grad=with_entropy,
        vocab_start=start, reduce_max=reduce_max, reduce_sum=reduce_sum,
    )  # fmt: skip
    return log_probs[:, None], entropy


def compute_log_probs(logits: torch.Tensor, tokens: torch.Tensor, process_group=None) -> torch.Tensor:
    """Log-probs [T, 1], see `calculate_log_probs_and_entropy`."""
    return calculate_log_probs_and_entropy(logits, tokens, process_group)[0]


def _vocabulary_part(logits: torch.Tensor, group) -> tuple:
    """(first id of this rank's part, maximum and sum over the parts, None where there is one)."""
    import torch.distributed as dist

    if group is None or dist.get_world_size(group) == 1:
        return 0, None, None

    largest, total = reduce_over(group, dist.ReduceOp.MAX), reduce_over(group, dist.ReduceOp.SUM)
    return dist.get_rank(group) * logits.shape[-1], largest, total
