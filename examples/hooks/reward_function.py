"""A reward is an async function of one sample.  --custom-rm-path examples/hooks/reward_function.py"""


async def custom_rm(args, sample, **kwargs):
    """1.0 when the label is in the response, and a little less the longer the response is."""
    found = str(sample.label) in sample.response
    return float(found) - 0.01 * sample.response_length
