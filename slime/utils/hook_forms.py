"""Which of the documented call forms a user's generate or reward hook has, by its signature alone.

Two families are accepted: the upstream form (one sample at a time) and the form the seed documents show (a list of
samples, a reward class). Knows the parameter names of the contract; calls nothing.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

BATCH_NAMES = ("samples", "batch", "group")


def _remembered(question: Callable) -> Callable:
    """Hooks are asked for their form at every sample; finding the answer costs as much as a short reward."""
    answers = functools.lru_cache(maxsize=256)(question)

    @functools.wraps(question)
    def ask(function: Any) -> Any:
        try:
            return answers(function)
        except TypeError:  # a callable object without a hash
            return question(function)

    return ask


@_remembered
def _parameters(function: Callable) -> tuple[inspect.Parameter, ...]:
    return tuple(inspect.signature(function).parameters.values())


def parameter_names(function: Callable) -> list[str]:
    """Names of the parameters that can be given by position, `self` of bound methods left out."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [p.name for p in _parameters(function) if p.kind in kinds]


def accepts_keyword(function: Callable, name: str) -> bool:
    """Whether the function has a parameter of this name."""
    return any(p.name == name and p.kind is not inspect.Parameter.POSITIONAL_ONLY for p in _parameters(function))


def accepted_keywords(function: Callable, offered: dict[str, Any]) -> dict[str, Any]:
    """The part of `offered` that the function takes (all of it with `**kwargs`)."""
    if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in _parameters(function)):
        return dict(offered)
    return {name: value for name, value in offered.items() if accepts_keyword(function, name)}


def generate_form(function: Callable) -> str:
    """ "sample" for `(args, sample, sampling_params[, evaluation])`, "list" for `(args, samples, evaluation=False)`.

    Raises:
        ValueError: the signature fits neither.
    """
    names = parameter_names(function)
    has_varargs = any(p.kind is inspect.Parameter.VAR_POSITIONAL for p in _parameters(function))
    if len(names) >= 2 and names[1] in BATCH_NAMES and "sampling_params" not in names:
        return "list"
    if len(names) >= 3 and names[2] != "evaluation" or has_varargs:
        return "sample"
    if len(names) >= 2 and "evaluation" in names[2:]:
        return "list"
    raise ValueError(
        f"is {getattr(function, '__qualname__', type(function).__name__)}({', '.join(names)}), neither "
        "(args, sample, sampling_params[, evaluation]) nor (args, samples, evaluation=False)"
    )


@_remembered
def reward_form(function: Any) -> str:
    """ "class" for a reward class or its instance (`compute_reward`), "batch" for `(args, samples, ...)`, else "single"."""
    if hasattr(function, "compute_reward"):
        return "class"
    names = parameter_names(function)
    return "batch" if len(names) >= 2 and names[1] in BATCH_NAMES else "single"


@_remembered
def is_plain(function: Any) -> bool:
    """Whether calling the hook computes at once (no coroutine): then it needs a thread."""
    function = getattr(function, "compute_reward", function)
    return not (inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__))
