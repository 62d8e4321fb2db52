"""When a round ends and what becomes of the rest.  --round-policy-path examples/hooks/round_policy.py:OneInReserve"""

from slime.rollout.round_policy import RoundPolicy


class OneInReserve(RoundPolicy):
    """Always one group more than needed is running, so that the slowest prompt never holds up a round."""

    def num_to_start(self, view):
        return max(0, view.target + 1 - view.num_passed - view.num_running)
