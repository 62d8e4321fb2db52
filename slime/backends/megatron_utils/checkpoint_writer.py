"""Write torch_dist shards in this process.

Megatron's writer forks workers and starts a manager process by spawning, which imports the main module again: seconds per
save, a process that stays, and a hang when a worker dies. A synchronous save needs none of them. The files are the same.
"""

from __future__ import annotations

import functools
import queue

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
