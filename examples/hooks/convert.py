"""From samples to training columns.  --custom-convert-samples-to-train-data-path examples/hooks/convert.py:convert

Replaces everything between rollout and trainer: the check of samples, reward normalisation, masks.
"""


def convert(args, samples):
    """One list per column, one entry per sample. The first seven are required, any other one travels to the trainer as well."""
    mean = sum(sample.get_reward_value(args) for sample in samples) / len(samples)
    return {
        "tokens": [sample.tokens for sample in samples],
        "response_lengths": [sample.response_length for sample in samples],
        "rewards": [sample.get_reward_value(args) - mean for sample in samples],
        "raw_reward": [sample.get_reward_value(args) for sample in samples],
        "truncated": [int(sample.status == sample.Status.TRUNCATED) for sample in samples],
        "sample_indices": [sample.index for sample in samples],
        "loss_masks": [sample.loss_mask or [1] * sample.response_length for sample in samples],
        "rollout_log_probs": [sample.rollout_log_probs for sample in samples],
    }
