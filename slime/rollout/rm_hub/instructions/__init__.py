"""Verifiable instructions: does a response follow them? Those of IFEval and of IFBench, by the ids of their data sets.

Invariants: text is looked at, never evaluated; no network, no data files, no trained models, so that a verdict depends on the
text alone. An id or argument that is not known is an error, never a silent 0.
"""

from __future__ import annotations

from collections.abc import Callable

from slime.rollout.rm_hub.instructions import counts, custom, ifeval, layout, wording

CHECKS: dict[str, Callable[[str, dict], bool]] = {
    **ifeval.CHECKS,
    **counts.CHECKS,
    **wording.CHECKS,
    **layout.CHECKS,
    **custom.CHECKS,
}
"""Instruction id -> check(response, arguments)."""


def follows(response: str, instruction_id: str, arguments: dict) -> bool:
    """Return whether a response follows one instruction; an empty response follows none.

    Raises: ValueError naming the instruction that is unknown, or whose arguments do not fit.
    """
    check = CHECKS.get(instruction_id)
    if check is None:
        raise ValueError(f"instruction {instruction_id!r} of metadata.instruction_id_list is not known")
    if not response.strip():
        return False
    try:
        return bool(check(response, arguments))
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise ValueError(
            f"instruction {instruction_id!r}: its arguments {arguments!r:.200} (metadata.kwargs) do not fit: {error!r}"
        ) from error
