"""An advantage estimator of your own, selected like the built-in ones.  --advantage-estimator examples/hooks/estimator.py:fading"""

import torch


def fading(inputs):
    """The reward, discounted by --gamma per token from the end of the response. Returns (advantages, returns), a tensor per sample.

    `inputs` (slime.algorithms.advantages.AdvantageInputs) holds rewards, response_lengths, loss_masks, kl, values and coefficients
    of the samples of this data rank; rewards arrive raw. `inputs.kl_penalty()` is kl_coef * kl per token.
    """
    rows = []
    for reward, penalty in zip(inputs.rewards, inputs.kl_penalty(), strict=True):
        from_end = torch.arange(len(penalty) - 1, -1, -1, device=penalty.device)
        rows.append(reward * inputs.gamma**from_end - penalty)
    return rows, rows
