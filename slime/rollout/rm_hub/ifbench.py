"""The `ifbench` reward type: are all verifiable instructions of a prompt followed?

The row's metadata holds `instruction_id_list` and `kwargs`; the checks are ours (`instructions`), for the ids of IFEval and
IFBench. Strict: every instruction, on the response as it is.
"""

from __future__ import annotations

from typing import Any

from slime.rollout.rm_hub.instructions import follows


def compute_ifbench_reward(response: str | None, label, metadata: dict | None) -> float:
    """Return 1.0 when every instruction is followed, else 0.0 (also without response or instructions).

    Raises:
        ValueError: an instruction is unknown or its arguments do not fit.
    """
    instructions = instructions_of(metadata or {})
    if response is None or not instructions:
        return 0.0
    return float(all(follows(str(response), name, arguments) for name, arguments in instructions))


def instructions_of(metadata: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """Return the clean instruction ids, each with its arguments.

    >>> instructions_of({"instruction_id_list": ["a", "", 3, "b"], "kwargs": [{"n": 2, "m": None}]})
    [('a', {'n': 2}), ('b', {'n': 2})]
    """
    ids = [item.strip() for item in metadata.get("instruction_id_list") or [] if isinstance(item, str) and item.strip()]
    arguments = _arguments(metadata.get("kwargs"), len(ids))
    prompt = metadata.get("prompt_text")
    if prompt:
        arguments = [{"prompt_to_repeat": str(prompt), **given} for given in arguments]
    return list(zip(ids, arguments, strict=True))


def _arguments(kwargs: Any, count: int) -> list[dict[str, Any]]:
    """Return one dict per instruction: None values removed, padded with the last one, cut to length."""
    given = [kwargs] if isinstance(kwargs, dict) else list(kwargs or [])
    clean = [{k: v for k, v in (item or {}).items() if v is not None} for item in given] or [{}]
    return [dict(clean[min(position, len(clean) - 1)]) for position in range(count)]
