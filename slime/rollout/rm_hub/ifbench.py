"""The `ifbench` reward type: are all verifiable instructions of a prompt followed?

The checks are AllenAI's (IFBench, module `evaluation_lib`), which the user puts on the Python path; nothing is
downloaded here. The row's metadata holds instruction_id_list, kwargs, prompt_text and record_id.
"""

from __future__ import annotations

import importlib
import re
from typing import Any

CHECKER_MODULE = "evaluation_lib"


def compute_ifbench_reward(response: str | None, label, metadata: dict | None) -> float:
    """Return 1.0 when the strict checker finds every instruction followed, else 0.0 (also without instructions).

    Raises:
        ValueError: the checker cannot be imported.
    """
    example = example_fields(label, metadata or {})
    if response is None or not example["instruction_id_list"]:
        return 0.0
    checker = load_checker()
    result = checker.test_instruction_following_strict(
        checker.InputExample(**example), {example["prompt"]: str(response)}
    )
    return float(bool(result.follow_all_instructions))


def load_checker():
    """Return IFBench's evaluation module."""
    try:
        return importlib.import_module(CHECKER_MODULE)
    except ImportError as error:
        raise ValueError(
            "--rm-type ifbench needs AllenAI's IFBench checker: get the IFBench repository, install its requirements and "
            f"put its folder on PYTHONPATH (importing {CHECKER_MODULE!r} failed: {error})"
        ) from error


def example_fields(label, metadata: dict[str, Any]) -> dict[str, Any]:
    """Return the checker's input: clean instruction ids and exactly one dict of arguments for each.

    >>> example_fields(None, {"instruction_id_list": ["a", "", 3], "kwargs": [{"n": 2, "m": None}], "record_id": "7"})
    {'key': 7, 'instruction_id_list': ['a'], 'prompt': '', 'kwargs': [{'n': 2}]}
    """
    ids = [item.strip() for item in metadata.get("instruction_id_list") or [] if isinstance(item, str) and item.strip()]
    return {
        "key": _integer(metadata.get("record_id")),
        "instruction_id_list": ids,
        "prompt": str(metadata.get("prompt_text") or ""),
        "kwargs": _arguments(metadata.get("kwargs"), len(ids)),
    }


def _arguments(kwargs: Any, count: int) -> list[dict[str, Any]]:
    """Return one dict per instruction: None values removed, padded with the last one, cut to length."""
    given = [kwargs] if isinstance(kwargs, dict) else list(kwargs or [])
    clean = [{k: v for k, v in (item or {}).items() if v is not None} for item in given] or [{}]
    return [dict(clean[min(position, len(clean) - 1)]) for position in range(count)]


def _integer(value: Any) -> int:
    text = str(value).strip()
    return int(text) if re.fullmatch(r"-?[0-9]{1,18}", text) else 0
