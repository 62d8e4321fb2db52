"""Weight sync by broadcast: the trainer's source rank and every engine rank share one process group outside WORLD.

One update is an envelope: pause all engines, flush their caches, begin, buckets, end, continue. Engines always continue, also
after a failure, and a failed update drops the group so that the next one starts clean. It does not know which model it carries.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

from slime.backends.weight_sync.bucket import buckets

if TYPE_CHECKING:
    import torch

    from slime.utils.engine_client import EngineClient

logger = logging.getLogger(__name__)

GROUP_NAME = "slime-pp_0"
# Requests in flight are put back and continue under the new weights instead of being cut.
PAUSE_MODE = "retract"
_FLUSH_DEADLINE_S = 60.0


class DistributedWeightSync:
    """Sends weights to ``clients``; lives on the trainer's source rank, which is rank 0 of the group.

    Args:
        backend: ``gloo`` or ``nccl``, what the trainer's device needs.
        ranks_per_engine: devices of one engine, each a rank of the group.
        buffer_bytes: bound of one bucket (``--update-weight-buffer-size``).
        timeout_s: deadline of every single call and collective.
    """

    def __init__(
        self,
        clients: list[EngineClient],
        *,
        backend: str,
        host: str,
        ranks_per_engine: int = 1,
        buffer_bytes: int,
        timeout_s: float,
    ):
        self.clients = clients
        self._backend, self._host, self._ranks_per_engine = backend, host, ranks_per_engine
        self._buffer_bytes, self._timeout_s = buffer_bytes, timeout_s
        self._group = None
        self._pool = ThreadPoolExecutor(max_workers=max(1, len(clients)), thread_name_prefix="weight-sync")

    def update(self, named_tensors: Iterable[tuple[str, torch.Tensor]], version: str) -> dict[str, float]:
        """Bring every engine to the given weights. Returns {"bytes", "buckets"} of what went over the wire.

        Raises:
            RuntimeError: an engine refused or did not answer in time; engines keep running, the next update reconnects.
        """
        started = time.monotonic()
        try:
            if self._group is None:
                self._connect()
            self._on_all(lambda client: client.pause(PAUSE_MODE))
            try:
                self._on_all(lambda client: client.flush_cache(_FLUSH_DEADLINE_S))
                self._on_all(lambda client: client.begin_weight_update())
                stats = self._send(named_tensors, version)
                self._on_all(lambda client: client.end_weight_update())
            finally:
                self._on_all(lambda client: client.continue_generation())
        except Exception as error:
            self._drop_group()
            raise RuntimeError(
                f"weight update to version {version} failed after {time.monotonic() - started:.1f} s: {error}. If this is a "
                "time-out: sync less often (--update-weights-interval) or look at the engine logs in the run directory"
            ) from error
        return stats

    def close(self) -> None:
        self._drop_group()
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _on_all(self, call: Callable[[EngineClient], object]) -> list:
        return [future.result(self._timeout_s + 30) for future in self._submit(call)]

    def _submit(self, call: Callable[[EngineClient], object]) -> list[Future]:
        return [self._pool.submit(call, client) for client in self.clients]

    def _connect(self) -> None:
        """Form the group: engines are told to join while rank 0 waits for them."""
        from slime.utils.distributed_utils import init_process_group
        from slime.utils.http_utils import find_free_port

        port = find_free_port(self._host)
        world_size = 1 + self._ranks_per_engine * len(self.clients)
        joining = [
            self._pool.submit(
                client.init_weights_update_group,
                master_address=self._host,
                master_port=port,
                rank_offset=1 + index * self._ranks_per_engine,
                world_size=world_size,
                group_name=GROUP_NAME,
                backend=self._backend,
            )
            for index, client in enumerate(self.clients)
        ]
        self._group = init_process_group(
            backend=self._backend,
            init_method=f"tcp://{self._host}:{port}",
            world_size=world_size,
            rank=0,
            group_name=GROUP_NAME,
            timeout_s=self._timeout_s,
        )
        for future in joining:
            future.result(self._timeout_s)

    def _send(self, named_tensors: Iterable[tuple[str, torch.Tensor]], version: str) -> dict[str, float]:
        num_bytes = num_buckets = 0
        for bucket in buckets(named_tensors, self._buffer_bytes):
            self._send_bucket(bucket, version)
            num_bytes += sum(tensor.numel() * tensor.element_size() for _, tensor in bucket)
            num_buckets += 1
        return {"bytes": num_bytes, "buckets": num_buckets}

    def _send_bucket(self, bucket: list[tuple[str, torch.Tensor]], version: str) -> None:
        """Announce the bucket to all engines, broadcast its tensors in order, wait for all replies."""
        import torch.distributed as dist

        names = [name for name, _ in bucket]
        dtypes = [str(tensor.dtype).removeprefix("torch.") for _, tensor in bucket]
        shapes = [list(tensor.shape) for _, tensor in bucket]
        replies = self._submit(
            lambda client: client.update_weights_from_distributed(
                names=names,
                dtypes=dtypes,
                shapes=shapes,
                group_name=GROUP_NAME,
                flush_cache=False,
                weight_version=version,
            )
        )
        sent = [dist.broadcast(tensor.contiguous(), src=0, group=self._group, async_op=True) for _, tensor in bucket]
        for work in sent:
            work.wait()
        for reply in replies:
            reply.result(self._timeout_s + 30)

    def _drop_group(self) -> None:
        import torch.distributed as dist

        if self._group is None:
            return
        for future in self._submit(lambda client: client.destroy_weights_update_group(GROUP_NAME)):
            try:
                future.result(10.0)
            except Exception as error:  # a dead or new engine has no group; the reconnect decides
                logger.warning("an engine could not leave the weight group: %s", error)
        dist.destroy_process_group(self._group)
        self._group = None
