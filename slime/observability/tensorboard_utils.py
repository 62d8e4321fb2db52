"""TensorBoard events through the tensorboard package alone, so that no torch import is needed to write a scalar.

It does not know metrics.jsonl or the step axes: it writes what it is given.
"""

from __future__ import annotations

import importlib.util
import os
import time
from pathlib import Path


def is_tensorboard_available() -> bool:
    """Tell whether the tensorboard package is installed."""
    return importlib.util.find_spec("tensorboard") is not None


def tensorboard_dir(args) -> Path:
    """Return where events go: TENSORBOARD_DIR, else the named project and experiment, else the run directory."""
    if os.environ.get("TENSORBOARD_DIR"):
        return Path(os.environ["TENSORBOARD_DIR"])
    if args.tb_project_name:
        return Path("tensorboard_log") / args.tb_project_name / (args.tb_experiment_name or args.run_name)
    return Path(args.run_dir) / "tensorboard"


class _TensorboardAdapter:
    """One event file. The name, underscore included, is what users' code imports."""

    def __init__(self, args):
        if not is_tensorboard_available():
            raise RuntimeError("--use-tensorboard needs the tensorboard package: pip install 'tensorboard>=2.15'")
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._writer = EventFileWriter(str(tensorboard_dir(args)), flush_secs=5)

    def log(self, data: dict[str, float], step: int, wall_time: float | None = None) -> None:
        """Write each number of `data` as a scalar at `step`; `wall_time` is now when not given."""
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        values = [Summary.Value(tag=tag, simple_value=float(value)) for tag, value in data.items()]
        now = time.time() if wall_time is None else wall_time
        self._writer.add_event(Event(wall_time=now, step=step, summary=Summary(value=values)))

    def forget_from(self, step: int) -> None:
        """Have readers drop everything at `step` and later, of every tag, that stands in this file and in earlier ones."""
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog

        start = SessionLog(status=SessionLog.START)
        self._writer.add_event(Event(wall_time=time.time(), step=step, session_log=start))

    def flush(self) -> None:
        """Hand everything written so far to the disk."""
        self._writer.flush()

    def close(self) -> None:
        """Flush and close the event file."""
        self._writer.close()
