"""Log lines of every process: `[2026-01-31 12:00:00 actor-1] file.py:12 - message`.

Invariants: nothing is configured at import; configuring twice replaces the handler of this package and touches no
handler of others. It does not know where standard error goes.
"""

from __future__ import annotations

import logging
import sys

_HANDLER_NAME = "slime"
_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")
_NOISY_LOGGERS = ("httpx", "httpcore", "urllib3", "filelock", "matplotlib")


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
