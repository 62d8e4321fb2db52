"""Advantages and losses of your own; both run in the trainer, on tensors.

--custom-advantage-function-path examples/hooks/loss.py:early_tokens_count_more
--loss-type custom_loss --custom-loss-function-path examples/hooks/loss.py:reinforce
"""

import torch


def early_tokens_count_more(args, rollout_data):
    """One advantage per response token: the sample's reward, fading with the position."""
    advantages = []
    for reward, mask in zip(rollout_data["rewards"], rollout_data["loss_masks"], strict=True):
        fade = 0.99 ** torch.arange(len(mask), dtype=torch.float32, device=mask.device)
        advantages.append(reward * fade)
    rollout_data["advantages"] = rollout_data["returns"] = advantages


def reinforce(args, batch, logits, sum_of_sample_mean):
    """Minus advantage times log-prob. `logits` [1, T, V] are those of all samples of the micro-batch, one after another.

    Returns the loss (the reducer averages as the flags say) and metrics by name.
    """
    log_probs, start = [], 0
    columns = zip(batch["tokens"], batch["total_lengths"], batch["response_lengths"], strict=True)
    for tokens, total, response in columns:
        first = start + total - response - 1  # these logits predict the first response token
        rows = logits[0, first : first + response, : args.vocab_size].float()
        answer = tokens[total - response :, None]
        log_probs.append(torch.log_softmax(rows, dim=-1).gather(1, answer)[:, 0])
        start += total
    log_probs, advantages = torch.cat(log_probs), torch.cat(batch["advantages"])
    loss = sum_of_sample_mean(-advantages * log_probs)
    return loss, {"loss": loss, "entropy_of_sampled": sum_of_sample_mean(-log_probs)}
