"""Log lines of every process: `[2026-01-31 12:00:00 actor-1] file.py:12 - message`; metrics that users' functions log.

Invariants: nothing is configured at import; configuring twice replaces the handler of this package and touches no
handler of others. Metrics wait in their process until the driver, the only writer, has them. It does not know where standard
error goes.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable

from slime.observability.timer import Timer

_HANDLER_NAME = "slime"
_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")
_NOISY_LOGGERS = ("httpx", "httpcore", "urllib3", "filelock", "matplotlib")

_logged: dict[str, float] = {}
_writer: Callable[[dict[str, float], str, int], None] | None = None  # of the driver


def configure_logger(level: str | int = "INFO", *, role: str = "", rank: int | None = None) -> None:
    """Send records of this process to standard error, marked with its role and rank.

    Args:
        level: a logging level, name (any case) or number.
        role: what the process is ("driver", "rollout", "actor", "engine"); empty for none.
        rank: rank of the process in its role, when it has one.
    """
    if isinstance(level, str):
        level = level.upper()
        if level not in _LEVELS:
            raise ValueError(f"log level {level!r} is unknown; choose one of {', '.join(_LEVELS)}")
    mark = role if rank is None else f"{role or 'rank'}-{rank}"
    handler = logging.StreamHandler(sys.stderr)
    handler.set_name(_HANDLER_NAME)
    space = " " if mark else ""
    handler.setFormatter(
        logging.Formatter(f"[%(asctime)s{space}{mark}] %(filename)s:%(lineno)d - %(message)s", "%Y-%m-%d %H:%M:%S")
    )
    root = logging.getLogger()
    for old in [h for h in root.handlers if h.get_name() == _HANDLER_NAME]:
        root.removeHandler(old)
    root.addHandler(handler)
    root.setLevel(level)
    for name in _NOISY_LOGGERS:
        logging.getLogger(name).setLevel(max(logging.WARNING, root.level))


# ---- metrics of users' functions ---------------------------------------------------------------------------------------


def log(args, metrics: dict[str, float], step_key: str) -> None:
    """Record metrics of a user's function with the round (or evaluation) that is being made.

    Args:
        step_key: the axis; `metrics[step_key]`, the step, is read in the driver's own process only.
    """
    values = {name: value for name, value in metrics.items() if name != step_key}
    if _writer is not None:
        _writer(values, step_key, int(metrics.get(step_key, 0)))
    else:
        _logged.update(values)


def take_logged() -> dict[str, float]:
    """What was logged in this process since the last call, and what `slime.observability.timer.Timer` measured."""
    taken = Timer().pop_metrics() | _logged
    _logged.clear()
    return taken


def set_writer(writer: Callable[[dict[str, float], str, int], None] | None) -> None:
    """Have `log` write at once: in the driver, while its tracker is open."""
    global _writer
    _writer = writer


def init_tracking(args, primary: bool = True, **_options) -> None:
    """For scripts that open trackers themselves: a run's trackers open with its processes."""


def finish_tracking(args=None) -> None:
    """Likewise: they close with the run."""
