"""Run a command that can never outlive the process that started it.

``python -m slime.utils.supervise PARENT_PID LOG_FILE -- COMMAND...`` starts COMMAND in a session of its own and ends it (terminate,
then kill, the whole process group) as soon as PARENT_PID is no longer this process's parent, or when told to stop. Servers that
know nothing of us (the router, SGLang) are started through it, so a killed run leaves nothing behind. Standard library only:
the process that stays resident is small.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

POLL_S = 0.2
GRACE_S = 3.0


def start(command: list[str], log_path: str, env: dict[str, str] | None = None) -> subprocess.Popen:
    """Start ``command`` under a supervisor that watches this process; its output goes to ``log_path``.

    Returns the supervisor's handle: ``poll()`` gives the command's exit status once it ended, ``terminate()`` ends both.
    """
    os.makedirs(os.path.dirname(log_path), exist_ok=True)
    supervisor = [sys.executable, "-m", "slime.utils.supervise", str(os.getpid()), log_path, "--", *command]
    return subprocess.Popen(supervisor, env=env, stdin=subprocess.DEVNULL, start_new_session=True)


def stop(process: subprocess.Popen, deadline_s: float = GRACE_S + 2.0) -> None:
    """End a supervised command and wait for it; kills the supervisor if it does not end within ``deadline_s``."""
    if process.poll() is not None:
        return
    process.terminate()
    try:
        process.wait(deadline_s)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait(1.0)


def log_tail(log_path: str, num_lines: int = 20) -> str:
    """Last lines of a supervised command's log, for error messages; a missing log reads as such."""
    try:
        with open(log_path, encoding="utf-8", errors="replace") as file:
            return "".join(file.readlines()[-num_lines:]).rstrip() or "(the log is empty)"
    except OSError as error:
        return f"(no log: {error})"


def _end_group(child: subprocess.Popen) -> None:
    """Terminate the child's process group, then kill whatever is left after the grace period."""
    for signal_number, wait_s in ((signal.SIGTERM, GRACE_S), (signal.SIGKILL, 1.0)):
        try:
            os.killpg(child.pid, signal_number)
        except ProcessLookupError:
            return
        try:
            child.wait(wait_s)
        except subprocess.TimeoutExpired:
            continue


def main(argv: list[str]) -> int:
    parent_pid, log_path, separator, *command = argv
    assert separator == "--" and command, f"usage: supervise PARENT_PID LOG_FILE -- COMMAND..., got {argv}"
    stop_requested = []
    for signal_number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(signal_number, lambda *_: stop_requested.append(True))
    with open(log_path, "ab", buffering=0) as log:
        child = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True)
    while child.poll() is None and not stop_requested and os.getppid() == int(parent_pid):
        time.sleep(POLL_S)
    if child.poll() is None:
        _end_group(child)
        return 0
    # A command that ended by itself may leave members of its group behind.
    _end_group(child)
    return child.returncode if child.returncode >= 0 else 128 - child.returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
