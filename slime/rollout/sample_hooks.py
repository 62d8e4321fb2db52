"""`--rollout-sample-hook-path`: user functions on every generated sample, before its reward.

A hook may be sync or async, and may return a new Sample or None (the same object goes on). Lists keep their shape.
"""

from __future__ import annotations

from typing import Any

from slime.utils.hook_calls import await_hook, wrong
from slime.utils.hook_forms import accepted_keywords
from slime.utils.misc import load_hook
from slime.utils.types import Sample

OPTION = "rollout_sample_hook_path"


async def apply_sample_hooks(args, result: Any, *, rollout_id: int | None = None, evaluation: bool = False) -> Any:
    """Run the hooks, in the order given, on every sample of a (nested) result.

    Raises:
        TypeError: a hook returned something else than a Sample or None.
    """
    if isinstance(result, list):
        return [await apply_sample_hooks(args, item, rollout_id=rollout_id, evaluation=evaluation) for item in result]
    for path in args.rollout_sample_hook_path or []:
        keywords = accepted_keywords(load_hook(path, OPTION), {"rollout_id": rollout_id, "evaluation": evaluation})
        output = await await_hook(path, OPTION, args, result, **keywords)
        if output is not None and not isinstance(output, Sample):
            raise TypeError(str(wrong(OPTION, path, f"returned a {type(output).__name__}")))
        result = result if output is None else output
    return result
