"""The folders that a run writes to: made when it starts, and held, so that no second run writes there at the same time.

A lock is the operating system's, on the file `.lock` of the folder: it ends with the process that holds it, however that ends. File
systems without locks are used without. A run that did not come to its first round takes away what it made. Knows nothing of what
is written.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import socket
import tempfile
from typing import IO

LOCK_FILE = ".lock"


class RunFolders:
    """Makes and holds `args.run_dir`, `args.save` and, for the disk transport, `args.update_weight_disk_dir`.

    Raises:
        OSError: one of them cannot be written to. ValueError: another run writes to it now.
    """

    def __init__(self, args) -> None:
        self._held: list[IO] = []
        self._made: list[str] = []
        places = {os.path.realpath(folder): flag for flag, folder in _folders(args)}
        try:
            for folder, flag in places.items():
                is_new = not os.path.isdir(folder)
                _make(folder, flag)
                self._held += _hold(folder, flag)
                self._made += [folder] if is_new else []  # held, so that no run that started at the same time is in it
        except BaseException:
            self.withdraw()
            raise

    def withdraw(self) -> None:
        """Remove the folders that were not there before, with what this run wrote to them, and release the others."""
        for folder in self._made:
            shutil.rmtree(folder, ignore_errors=True)
        self.release()

    def release(self) -> None:
        while self._held:
            self._held.pop().close()


def _folders(args) -> list[tuple[str, str]]:
    disk = args.update_weight_disk_dir if args.update_weight_transport == "disk" else None
    save = None if args.debug_rollout_only or args.num_rollout == 0 else args.save  # those only read what is there
    folders = [("--run-name", args.run_dir), ("--save", save), ("--update-weight-disk-dir", disk)]
    return [(flag, folder) for flag, folder in folders if folder is not None]


def _make(folder: str, flag: str) -> None:
    """A place that cannot be written fails now, not at the first save."""
    try:
        os.makedirs(folder, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        flag = "--output-dir" if flag == "--run-name" else flag
        raise OSError(f"{flag}: cannot write to {folder}: {error.strerror or error}") from error


def _hold(folder: str, flag: str) -> list[IO]:
    """The locked file; an empty list where the file system has no locks, or the file is another user's own."""
    file = _opened(os.path.join(folder, LOCK_FILE))
    if file is None:
        return []
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.seek(0)
        holder = file.read().strip() or "unknown"
        file.close()
        raise ValueError(
            f"{flag}: another run ({holder}) writes to {folder} now; wait for its end, or give this one another {flag}"
        ) from None
    except OSError:
        file.close()
        return []
    if file.writable():
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
        file.flush()
    return [file]


def _opened(path: str) -> IO | None:
    """The file, made if it is not there; one of another user is locked without writing to it. None if that is not allowed."""
    for mode in ("a+", "r"):
        with contextlib.suppress(PermissionError):
            return open(path, mode, encoding="utf-8")
    return None
