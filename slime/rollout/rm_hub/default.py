"""Which reward grades a run that names none: known before engines start, never found out at the first sample."""

from __future__ import annotations

from collections.abc import Iterable

DEFAULT_RM_TYPE = "math"


def choose_reward(args, prompts: Iterable) -> str | None:
    """Set ``args.rm_type`` when the run names no reward and its prompts carry labels.

    Args:
        prompts: the data set's samples, in order.

    Returns:
        A note to be said at start, or None when there was nothing to choose.

    Raises:
        ValueError: a prompt can be graded by nothing: no reward is named and it has neither label nor reward type.
    """
    if args.rm_type or args.custom_rm_path:
        return None
    ungraded = [sample for sample in prompts if not (sample.metadata or {}).get("rm_type")]
    for sample in ungraded:
        if sample.label is None and sample.reward is None:
            raise ValueError(
                f"no reward is named and a prompt of {args.prompt_data} has no label: {str(sample.prompt)[:80]!r}. Give --rm-type or "
                "--custom-rm-path, or --label-key if the labels stand under another key"
            )
    if not ungraded or all(sample.reward is not None for sample in ungraded):
        return None
    args.rm_type = DEFAULT_RM_TYPE
    return f"--rm-type is {DEFAULT_RM_TYPE}: the rows carry labels and no reward is named"
