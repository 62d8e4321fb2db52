"""Old import path of the loss mathematics; the code is in `slime.algorithms`."""

from slime.algorithms.advantages import gae
from slime.algorithms.kl import approx_kl
from slime.algorithms.logprobs import log_probs_and_entropy
from slime.algorithms.policy_loss import cispo_loss, opsm, ppo_clip_loss, sequence_kl
from slime.algorithms.scan import discounted_returns

__all__ = [
    "approx_kl",
    "cispo_loss",
    "discounted_returns",
    "gae",
    "log_probs_and_entropy",
    "opsm",
    "ppo_clip_loss",
    "sequence_kl",
]
