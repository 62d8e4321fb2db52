"""Run a command that can never outlive the process that started it.

``start`` leaves behind a small resident supervisor that holds one end of a pipe to us. When this process ends, however it ends,
the pipe closes and the supervisor ends the command with its whole process group. The supervisor is no child of this process, since
some parents (Ray's workers) kill their children when they exit, and a killed supervisor could end nothing. Servers that know
nothing of us (the router, SGLang) are started through it. Standard library only.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from collections import deque

POLL_S = 0.2
GRACE_S = 3.0
_START_DEADLINE_S = 60.0


class Supervised:
    """Handle of a supervised command: ``poll`` tells whether it ended, ``stop`` ends it, and so does the end of this process."""

    def __init__(self, launcher: subprocess.Popen):
        self._control, self._reports = launcher.stdin, launcher.stdout
        self._status: int | None = None
        self.pid = int(self._report(_START_DEADLINE_S) or -1)
        launcher.wait()
        if self.pid < 0:
            raise RuntimeError(f"the supervisor did not start its command within {_START_DEADLINE_S:.0f} s")

    def poll(self) -> int | None:
        """Exit status of the command, None while it runs; a command ended by signal N has status 128 + N."""
        if self._status is None:
            report = self._report(0.0)
            if report is not None:
                self._status = int(report or 1)
        return self._status

    def stop(self, deadline_s: float = GRACE_S + 4.0) -> None:
        """End the command and wait until it is gone.

        Raises:
            RuntimeError: it was still there after ``deadline_s``.
        """
        self._control.close()
        if self._status is None:
            report = self._report(deadline_s)
            if report is None:
                raise RuntimeError(f"process {self.pid} did not end within {deadline_s:.0f} s of being killed")
            self._status = int(report or 1)

    def _report(self, wait_s: float) -> str | None:
        """Next line of the supervisor; "" when it is gone, None when it said nothing within ``wait_s``."""
        readable, _, _ = select.select([self._reports], [], [], wait_s)
        return self._reports.readline().decode().strip() if readable else None


def start(command: list[str], log_path: str, env: dict[str, str] | None = None) -> Supervised:
    """Start ``command`` under a supervisor; its output is appended to ``log_path``."""
    os.makedirs(os.path.dirname(log_path), exist_ok=True)
    launcher = [sys.executable, "-m", "slime.utils.supervise", "launch", log_path, *command]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "bufsize": 0}
    return Supervised(subprocess.Popen(launcher, env=env, start_new_session=True, **pipes))


def log_tail(log_path: str, num_lines: int = 20) -> str:
    """Last lines of a supervised command's log, for error messages; a missing log reads as such."""
    try:
        with open(log_path, encoding="utf-8", errors="replace") as file:
            return "".join(deque(file, num_lines)).rstrip() or "(the log is empty)"  # logs of long runs are large
    except OSError as error:
        return f"(no log: {error})"


def _launch(arguments: list[str]) -> None:
    """Start the resident supervisor with our pipes and leave, so that it belongs to nobody."""
    subprocess.Popen([sys.executable, "-m", "slime.utils.supervise", "watch", *arguments], start_new_session=True)


def _watch(log_path: str, command: list[str]) -> None:
    """Run the command until it ends or the pipe of whoever started us closes; say its pid first and its status last."""
    with open(log_path, "ab", buffering=0) as log:
        try:
            child = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True)
        except OSError as error:
            log.write(f"{command[0]}: {error}\n".encode())
            _say(-1)
            return
    for signal_number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(signal_number, lambda *_: _end_group(child))
    _say(child.pid)
    while child.poll() is None and not _is_closed(sys.stdin, POLL_S):
        pass
    _end_group(child)  # the command, or what a command that ended by itself left of its group
    _say(child.returncode if child.returncode >= 0 else 128 - child.returncode)


def _say(number: int) -> None:
    try:
        os.write(sys.stdout.fileno(), f"{number}\n".encode())
    except OSError:
        return  # nobody listens any more: the process that started us is gone


def _is_closed(stream, wait_s: float) -> bool:
    readable, _, _ = select.select([stream], [], [], wait_s)
    return bool(readable) and os.read(stream.fileno(), 1) == b""


def _end_group(child: subprocess.Popen) -> None:
    """Terminate the child's process group, then kill whatever is left of it after the grace period."""
    for signal_number, wait_s in ((signal.SIGTERM, GRACE_S), (signal.SIGKILL, 1.0)):
        try:
            os.killpg(child.pid, signal_number)
        except (ProcessLookupError, PermissionError):  # macOS answers the latter for a group of zombies
            break
        give_up_at = time.monotonic() + wait_s
        while _group_exists(child) and time.monotonic() < give_up_at:
            time.sleep(0.02)
    child.wait(1.0)


def _group_exists(child: subprocess.Popen) -> bool:
    child.poll()  # a zombie leader would keep the group alive
    try:
        os.killpg(child.pid, 0)
    except (ProcessLookupError, PermissionError):
        return False
    return True


def main(argv: list[str]) -> None:
    action, log_path, *command = argv
    assert action in ("launch", "watch") and command, f"usage: supervise launch LOG_FILE COMMAND..., got {argv}"
    if action == "launch":
        _launch([log_path, *command])
    else:
        _watch(log_path, command)


if __name__ == "__main__":
    main(sys.argv[1:])
