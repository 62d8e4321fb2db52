r"""The `deepscaler` reward type: grade the boxed answer of the solution part of a reasoning trace.

The solution is what follows the last `</think>`; without one, what follows the first `###Response` up to the next.
"""

from __future__ import annotations

from slime.rollout.rm_hub.math_utils import grade_answer_verl


def get_deepscaler_rule_based_reward(response: str, label) -> int:
    """Return 1 for a right boxed answer in the solution part, else 0."""
    solution = solution_part(response)
    return int(solution is not None and grade_answer_verl(solution, label))


def solution_part(response: str) -> str | None:
    """Return the text after the reasoning, or None when neither marker is there."""
    if "</think>" in response:
        return response.rsplit("</think>", 1)[1]
    parts = response.split("###Response")
    return parts[1] if len(parts) > 1 else None
