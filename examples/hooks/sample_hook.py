"""Look at or change each sample between generation and reward.  --rollout-sample-hook-path examples/hooks/sample_hook.py:strip_answer

The flag may be given several times. The readable `response` may change; the tokens that are trained do not.
"""


def strip_answer(args, sample, *, rollout_id=None, evaluation=False):
    """Let the reward see the part after "Answer:" only. Return None (same object) or another Sample."""
    sample.metadata["full_response"] = sample.response
    sample.response = sample.response.rpartition("Answer:")[2].strip()
