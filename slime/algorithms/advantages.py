"""Advantages and returns of a whole rollout batch, by estimator name.

`compute(estimator, AdvantageInputs(...))` is what the trainer calls, once per rollout, with *full* responses (under
context parallelism: gathered first, sliced again after). Estimators are functions of AdvantageInputs that return
(advantages, returns), one tensor per sample each; ESTIMATORS maps the names, a path names a user's function.

Invariants: inputs are never modified (the logged KL stays the KL); shapes come from the response lengths alone;
outputs carry no gradient. Group-relative estimators receive rewards that `rewards.py` has normalised already.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch.nn.utils.rnn import pad_sequence

from slime.algorithms.numeric import working_precision
from slime.algorithms.scan import discounted_returns
from slime.utils.hook_calls import call_path, wrong
from slime.utils.misc import load_function

Rows = list[torch.Tensor]


@dataclass(frozen=True)
class AdvantageInputs:
    """Everything an estimator may look at; every list has one entry per sample.

    rewards: scalar reward of each sample, normalised where the estimator is group-relative.
    response_lengths: L_i, masked tokens included.
    loss_masks: [L_i] of 0 and 1.
    kl: [L_i] per-token KL to the reference, or None when there is none.
    values: [L_i] critic values, needed by `ppo` only.
    """

    rewards: Sequence[float]
    response_lengths: Sequence[int]
    loss_masks: Sequence[torch.Tensor]
    kl: Sequence[torch.Tensor] | None = None
    values: Sequence[torch.Tensor] | None = None
    kl_coef: float = 0.0
    gamma: float = 1.0
    lambd: float = 1.0

    def kl_penalty(self) -> Rows:
        """Return kl_coef * kl per sample, zeros where no KL was given."""
        if self.kl is None or self.kl_coef == 0:
            return [
                mask.new_zeros(n, dtype=torch.float32) for mask, n in zip_rows(self.loss_masks, self.response_lengths)
            ]
        return [self.kl_coef * working_precision(kl.detach()) for kl in self.kl]


def zip_rows(*columns):
    """Zip per-sample columns that must have equal length."""
    return zip(*columns, strict=True)


@torch.no_grad()
def compute(estimator: str, inputs: AdvantageInputs) -> tuple[Rows, Rows]:
    """Return (advantages, returns), one [L_i] tensor per sample.

    Raises:
        ValueError: unknown estimator name, critic values missing for `ppo`, or a user's result that does not fit the samples.
    """
    function = resolve(estimator)
    if estimator in ESTIMATORS:
        return function(inputs)
    columns = call_path(estimator, "advantage_estimator", inputs)
    _check_columns(estimator, columns, inputs.response_lengths)
    return columns


def _check_columns(estimator: str, columns, lengths: Sequence[int]) -> None:
    """Refuse what a user's estimator returned unless it is one row of the right length per sample, twice."""
    if not isinstance(columns, (tuple, list)) or len(columns) != 2:
        raise wrong("advantage_estimator", estimator, f"returned a {type(columns).__name__}")
    for name, rows in zip(("advantages", "returns"), columns, strict=True):
        is_list = isinstance(rows, (list, tuple))
        found = [tuple(getattr(row, "shape", ())) for row in rows] if is_list else type(rows).__name__
        if found != [(length,) for length in lengths]:
            what = f"returned {name} of shapes {found}, the responses have {list(lengths)} tokens"
            raise wrong("advantage_estimator", estimator, what)


def resolve(estimator: str) -> Callable[[AdvantageInputs], tuple[Rows, Rows]]:
    """Return the function behind an estimator name or a path (dotted, or `file.py:function`)."""
    if estimator in ESTIMATORS:
        return ESTIMATORS[estimator]
    if "." not in estimator:
        raise ValueError(
            f"--advantage-estimator {estimator!r} is unknown; choose one of {', '.join(ESTIMATORS)}, or a path of yours "
            "(package.module.function or file.py:function)"
        )
    return load_function(estimator)


def outcome(inputs: AdvantageInputs) -> tuple[Rows, Rows]:
    """Give every token of a response its (normalised) reward.

    Serves grpo, gspo, cispo, rloo and dr_grpo: they differ in the reward normalisation and in the loss.
    Source: DeepSeekMath (2024) eq. 4 outcome supervision; GSPO (2025); CISPO in MiniMax-M1 (2025); RLOO (Ahmadian
    et al. 2024); Dr. GRPO (Liu et al. 2025).
    """
    if not inputs.loss_masks:
        return [], []
    where, lengths = inputs.loss_masks[0].device, list(inputs.response_lengths)
    rewards = torch.tensor([float(reward) for reward in inputs.rewards], dtype=torch.float32, device=where)
    flat = rewards.repeat_interleave(torch.tensor(lengths, device=where))
    return list(flat.split(lengths)), list(flat.clone().split(lengths))


def ppo(inputs: AdvantageInputs) -> tuple[Rows, Rows]:
    """Generalised advantage estimation on token rewards: -kl_coef*kl_t, plus the outcome on the last token.

    Source: Schulman et al. (2016). The loss mask is not consulted: masked tokens take part in the recursion.
    """
    if inputs.values is None:
        raise ValueError("--advantage-estimator ppo needs critic values, got none")
    token_rewards = ppo_token_rewards(inputs)
    return gae(token_rewards, inputs.values, inputs.gamma, inputs.lambd)


def ppo_token_rewards(inputs: AdvantageInputs) -> Rows:
    """Return the shaped token rewards of PPO, as new tensors."""
    rows = []
    for reward, penalty in zip_rows(inputs.rewards, inputs.kl_penalty()):
        row = -penalty
        if len(row):
            row[-1] += float(reward)
        rows.append(row)
    return rows


def gae(
    rewards: Sequence[torch.Tensor], values: Sequence[torch.Tensor], gamma: float, lambd: float
) -> tuple[Rows, Rows]:
    """Return (advantages, advantages + values) per row, with the value beyond the end taken as 0."""
    if not rewards:
        return [], []
    lengths = [len(row) for row in rewards]
    padded_values = pad_sequence([working_precision(v.detach()) for v in values], batch_first=True)
    padded_rewards = pad_sequence(list(rewards), batch_first=True).to(padded_values.dtype)
    next_values = torch.zeros_like(padded_values)
    next_values[:, :-1] = padded_values[:, 1:]
    deltas = padded_rewards + gamma * next_values - padded_values
    advantages = discounted_returns(deltas, gamma * lambd)
    returns = advantages + padded_values
    return _unpad(advantages, lengths), _unpad(returns, lengths)


def reinforce_plus_plus(inputs: AdvantageInputs) -> tuple[Rows, Rows]:
    """Discounted sum of -kl_coef*kl_t over unmasked tokens, with the outcome on the last unmasked token.

    Source: REINFORCE++ (Hu 2025). A fully masked sample (a removed one) gets zeros.
    """
    rows = []
    for reward, penalty, mask in zip_rows(inputs.rewards, inputs.kl_penalty(), inputs.loss_masks):
        row = -penalty * mask.to(penalty.dtype)
        trained = mask.nonzero()
        if len(trained):
            row[trained[-1, 0]] += float(reward)
        rows.append(row)
    if not rows:
        return [], []
    returns = discounted_returns(pad_sequence(rows, batch_first=True), inputs.gamma)
    rows = _unpad(returns, [len(row) for row in rows])
    return rows, [row.clone() for row in rows]


def reinforce_plus_plus_baseline(inputs: AdvantageInputs) -> tuple[Rows, Rows]:
    """Centred reward minus kl_coef*kl_t for every token; the KL is not masked."""
    rows = [float(reward) - penalty for reward, penalty in zip_rows(inputs.rewards, inputs.kl_penalty())]
    return rows, [row.clone() for row in rows]


def _unpad(padded: torch.Tensor, lengths: Sequence[int]) -> Rows:
    return [row[:length].contiguous() for row, length in zip_rows(padded, lengths)]


ESTIMATORS: dict[str, Callable[[AdvantageInputs], tuple[Rows, Rows]]] = {
    "grpo": outcome,
    "gspo": outcome,
    "cispo": outcome,
    "rloo": outcome,
    "dr_grpo": outcome,
    "ppo": ppo,
    "reinforce_plus_plus": reinforce_plus_plus,
    "reinforce_plus_plus_baseline": reinforce_plus_plus_baseline,
}
