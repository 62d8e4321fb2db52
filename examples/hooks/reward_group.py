"""All samples of a prompt in one call, to compare them.  --group-rm --custom-rm-path examples/hooks/reward_group.py"""


async def custom_rm(args, samples, **kwargs):
    """Rank the answers of a prompt by length: the shortest gets 1, the longest 0. One reward per sample, same order."""
    by_length = sorted(samples, key=lambda sample: sample.response_length)
    rank = {sample.index: position for position, sample in enumerate(by_length)}
    return [1 - rank[sample.index] / max(1, len(samples) - 1) for sample in samples]
