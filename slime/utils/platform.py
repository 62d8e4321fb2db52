"""What only Linux or only macOS has: memory of a process tree, the folder of shared memory.

Invariants: every function answers on both systems, with the better source where there is one. No other module of the
package names a system folder. It does not know what the numbers are for.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import tempfile
import time
from pathlib import Path

#: A process started with this variable belongs to the family that its value names.
FAMILY_VARIABLE = "SLIME_FAMILY"

_PROC = Path("/proc")
_SHARED_MEMORY = Path("/dev/shm")


def process_age_s() -> float:
    """Seconds since this process was started."""
    import psutil

    return time.time() - psutil.Process().create_time()


def shared_memory_dir() -> Path:
    """Return the folder that lives in memory, or the folder of temporary files where the system has none."""
    if _SHARED_MEMORY.is_dir() and os.access(_SHARED_MEMORY, os.W_OK):
        return _SHARED_MEMORY
    return Path(tempfile.gettempdir())


def shared_memory_free_bytes() -> int:
    """Return how much can still be written to shared memory; containers often have 64 MiB in all."""
    return shutil.disk_usage(shared_memory_dir()).free


def trim_heap() -> None:
    """Give freed memory back to the system where the C library holds on to it (glibc)."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def process_tree_memory_bytes(pid: int | None = None) -> int:
    """Return the memory of a process (this one by default) and all below it; 0 when it is gone.

    Pages that several processes share count once on Linux (proportional set size), once per process elsewhere.
    """
    import psutil

    try:
        root = psutil.Process(pid)
        processes = [root, *root.children(recursive=True)]
    except psutil.NoSuchProcess:
        return 0
    return sum(_process_memory_bytes(process) for process in processes)


def family_memory_bytes(mark: str) -> int:
    """Return the memory of all processes that were started with ``FAMILY_VARIABLE`` set to ``mark``, whoever is their parent now.

    A run's servers are supervised and belong to nobody, so its process tree does not hold them.
    """
    return sum(_process_memory_bytes(process) for process in family(mark))


def family(mark: str) -> list:
    """Return the processes (psutil) that were started with ``FAMILY_VARIABLE`` set to ``mark``."""
    import psutil

    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(FAMILY_VARIABLE) == mark:
                found.append(process)
        except (psutil.Error, OSError):
            continue  # it ended, or belongs to somebody else
    return found


def _process_memory_bytes(process) -> int:
    import psutil

    share = _proportional_bytes(process.pid)
    if share is not None:
        return share
    try:
        return process.memory_info().rss
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return 0


def _proportional_bytes(pid: int) -> int | None:
    """Return the proportional set size, None where the system does not tell it."""
    try:
        for line in (_PROC / str(pid) / "smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    except OSError:  # another system, a process that ended, or one of another user
        return None
    return None
