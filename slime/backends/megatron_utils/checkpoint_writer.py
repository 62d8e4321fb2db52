"""Write torch_dist shards in this process, at once or in the background.

Megatron's writer forks workers and starts a manager process by spawning, which imports the main module again: seconds per
save, a process that stays, and a hang when a worker dies. A synchronous save needs none of them. The files are the same.
"""

from __future__ import annotations

import contextlib
import functools
import queue
import threading
from collections.abc import Iterator

from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy


class InProcessSave(TorchDistSaveShardedStrategy):
    """Megatron's torch_dist strategy with one file per rank and no helper processes."""

    def __init__(self):
        super().__init__("torch_dist", 1, thread_count=1)

    def async_save(self, sharded_state_dict, checkpoint_dir):
        filesystem_async._results_queue = queue.Queue()
        return super().async_save(sharded_state_dict, checkpoint_dir)

    def _get_save_and_finalize_callbacks(self, writer, save_state_dict_ret):
        request = super()._get_save_and_finalize_callbacks(writer, save_state_dict_ret)
        if request.async_fn is None:  # nothing to write on this rank
            return request
        transforms = request.async_fn.args[0]
        return request._replace(async_fn=functools.partial(_write_buckets, transforms))


class BackgroundWrite:
    """A save whose files a thread of this process writes while training goes on.

    The state is copied first, so what is written is that of the moment of the save. Files are complete, and readable as a
    checkpoint, after `finish` on all ranks.
    """

    def __init__(self, request):
        self._finalizers, self._thread = request.finalize_fns, None
        if request.async_fn is None:  # nothing to write on this rank
            return
        rank, live, results = request.async_fn_args
        copies = _own_tensors(live, request.preload_fn())
        self._thread = threading.Thread(
            target=request.async_fn, args=(rank, copies, results), name="checkpoint-writer", daemon=True
        )
        self._thread.start()

    @property
    def is_written(self) -> bool:
        """Whether this rank's files are on the disk (or could not be written: `finish` says so)."""
        return self._thread is None or not self._thread.is_alive()

    def finish(self) -> None:
        """Wait for the thread and write what makes the files a checkpoint; all ranks call it together.

        Raises: RuntimeError when a rank could not write.
        """
        if self._thread is not None:
            self._thread.join()
        with failure_as_error():
            for finalize in self._finalizers:
                finalize()


@contextlib.contextmanager
def failure_as_error() -> Iterator[None]:
    """Turn torch's exception of a failed write, which is no `Exception`, into a RuntimeError with the cause."""
    from torch.distributed.checkpoint import CheckpointException

    try:
        yield
    except CheckpointException as failure:
        causes = {str(cause[0]) for cause in failure.failures.values()}
        raise RuntimeError(f"the checkpoint could not be written: {'; '.join(sorted(causes))}") from failure


def _own_tensors(live: list, staged: list) -> list:
    """Return the staged buckets with copies of the tensors that staging left in place, because they are in host memory."""
    buckets = []
    for (path, name, (plain, tensors)), (_, _, (_, moved)) in zip(live, staged, strict=True):
        pairs = zip(tensors, moved, strict=True)
        copies = [(item, new.clone() if new is old else new) for (item, old), (_, new) in pairs]
        buckets.append((path, name, (plain, copies)))
    return buckets


def _write_buckets(transforms, rank: int, buckets: list, results_queue: queue.Queue) -> None:
    """Write each bucket to its file and hand the results over; an error is handed over too and raised by the reader."""
    results: dict | Exception = {}
    for number, bucket in enumerate(buckets):
        written = queue.Queue()
        filesystem_async.FileSystemWriterAsync.write_preloaded_data(
            transforms, number, bucket, written, _TaskCount(), use_fsync=True
        )
        _, outcome = written.get_nowait()
        if isinstance(outcome, Exception):
            results = outcome
            break
        results[number] = outcome
    results_queue.put(results)


class _TaskCount:
    """Stands for the queue that counts finished workers: the one worker is the caller."""

    def get(self):
        return None

    def task_done(self):
        return None
