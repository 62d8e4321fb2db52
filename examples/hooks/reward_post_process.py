"""From rewards to training rewards.  --custom-reward-post-process-path examples/hooks/reward_post_process.py:minus_group_mean

Replaces the normalisation within groups. The first list is logged, the second one is what advantages are made of.
"""

from collections import defaultdict


def minus_group_mean(args, samples, **kwargs):
    raw = [float(sample.get_reward_value(args)) for sample in samples]
    groups = defaultdict(list)
    for sample, reward in zip(samples, raw, strict=True):
        groups[sample.group_index].append(reward)
    means = {index: sum(rewards) / len(rewards) for index, rewards in groups.items()}
    return raw, [reward - means[sample.group_index] for sample, reward in zip(samples, raw, strict=True)]
