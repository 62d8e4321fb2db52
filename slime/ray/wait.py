"""Waiting for Ray results with a deadline, progress in between, and errors that a user can read."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from slime.utils.hook_calls import HookError

_POLL_S = 1.0  # of progress only: results and failures of a single reference wake the wait at once
# What a worker raises about the user's flags, files and hooks; everything else is a failure of the run.
_USER_ERRORS = (ValueError, FileNotFoundError, ImportError)


def wait_for(references, what: str, *, deadline_s: float, on_poll: Callable[[], Any] | None = None) -> Any:
    """The value(s) of ``references``; the first failure ends the wait at once.

    Args:
        deadline_s: longest time without a sign of life. ``on_poll`` is called about once a second, and whenever its value
            changes (a progress snapshot) the clock starts anew.

    Raises:
        RuntimeError: a worker failed (its own message comes first), or nothing moved for ``deadline_s``.
    """
    import ray

    pending = list(references) if isinstance(references, list) else [references]
    values: dict[Any, Any] = {}
    evidence: Any = None
    changed_at = time.monotonic()
    while pending:
        done, pending = ray.wait(pending, num_returns=len(pending), timeout=_POLL_S)
        values |= {reference: _value(reference, what) for reference in done}
        if not pending:
            break  # what is done within the first second is never asked for its progress
        current = on_poll() if on_poll else None
        if done or current != evidence:
            evidence, changed_at = current, time.monotonic()
        elif time.monotonic() - changed_at > deadline_s:
            raise RuntimeError(
                f"waited {deadline_s:.0f} s for {what} without a sign of life (--stall-timeout); last seen: {evidence}"
            )
    return [values[reference] for reference in references] if isinstance(references, list) else values[references]


def _value(reference, what: str) -> Any:
    import ray

    try:
        return ray.get(reference, timeout=60)
    except ray.exceptions.RayTaskError as error:
        cause = error.cause if error.cause is not None else error
        if isinstance(cause, _USER_ERRORS):
            raise ValueError(str(cause)) from error
        name = "" if type(cause) in (RuntimeError, HookError) else f"{type(cause).__name__}: "
        raise RuntimeError(f"{what} failed: {name}{cause}") from error
    except ray.exceptions.RayActorError as error:
        raise RuntimeError(f"{what}: the process died ({error}). Out of memory is the usual cause") from error
