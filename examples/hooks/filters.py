"""Which groups and samples are trained.

--dynamic-sampling-filter-path examples/hooks/filters.py:keep_mixed       keep or drop a finished group; a dropped one is replaced
--buffer-filter-path examples/hooks/filters.py:newest_first               which groups leave the buffer next
--rollout-sample-filter-path examples/hooks/filters.py:drop_truncated     which samples of the kept groups stay out of the loss
"""

from slime.rollout.filter_hub.base_types import DynamicFilterOutput


def keep_mixed(args, samples, **kwargs):
    """Keep a prompt whose answers are neither all right nor all wrong. The reason becomes a metric."""
    rewards = [sample.get_reward_value(args) for sample in samples]
    if max(rewards) > min(rewards):
        return DynamicFilterOutput(keep=True)
    return DynamicFilterOutput(keep=False, reason=f"all_{rewards[0]:.1f}", keep_when_insufficient=True)


def newest_first(args, rollout_id, buffer, num_samples):
    """Groups that came back last are the least stale. What is returned must be removed from `buffer`."""
    picked = buffer[-num_samples:][::-1]
    del buffer[-num_samples:]
    return picked


def drop_truncated(args, groups):
    """Cut-off answers count for the group's mean reward, but no gradient flows through them."""
    for group in groups:
        for sample in group:
            sample.remove_sample = sample.status == sample.Status.TRUNCATED
