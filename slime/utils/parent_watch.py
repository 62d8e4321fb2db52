"""End this process when the process that started it is gone, so that no server outlives its launcher.

Portable: compares os.getppid() with the expected parent once per interval. Knows nothing about what the process does.
"""

from __future__ import annotations

import os
import threading
import time


def exit_with_parent(parent_pid: int, interval_s: float = 1.0, exit_code: int = 0) -> threading.Thread:
    """Start a daemon thread that ends the process (os._exit) once its parent is no longer `parent_pid`.

    Raises: ValueError for a pid that is not positive.
    """
    if parent_pid <= 0:
        raise ValueError(f"parent_pid={parent_pid}: expected the id of a process")

    def watch() -> None:
        while os.getppid() == parent_pid:
            time.sleep(interval_s)
        os._exit(exit_code)

    thread = threading.Thread(target=watch, name="parent-watch", daemon=True)
    thread.start()
    return thread
