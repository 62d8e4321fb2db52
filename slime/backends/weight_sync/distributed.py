"""Transport by broadcast: the trainer's source rank and every engine rank share one process group outside WORLD."""

from __future__ import annotations

import logging
import threading
import time
from typing import TYPE_CHECKING

from slime.backends.weight_sync.publisher import CLEAN_UP_S, Submit, wait_all

if TYPE_CHECKING:
    from concurrent.futures import Future

    from slime.backends.weight_sync.publisher import Bucket
    from slime.utils.engine_client import EngineClient

logger = logging.getLogger(__name__)

GROUP_NAME = "slime-pp_0"
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.0001, 0.01  # between looks at a broadcast


class BroadcastTransport:
    """Sends buckets to ``clients``; lives on the trainer's source rank, which is rank 0 of the group.

    Args:
        backend: ``gloo`` or ``nccl``, what the trainer's device needs.
        ranks_per_engine: devices of one engine, each a rank of the group.
        timeout_s: deadline of every single call and collective.
    """

    def __init__(
        self, clients: list[EngineClient], *, backend: str, host: str, ranks_per_engine: int = 1, timeout_s: float
    ):
        self.clients = clients
        self._backend, self._host, self._ranks_per_engine = backend, host, ranks_per_engine
        self._timeout_s = timeout_s
        self._group = None

    def connect(self, submit: Submit) -> None:
        """Form the group, once: engines are told to join while rank 0 waits for them."""
        from slime.utils.http_utils import find_free_port
        from slime.utils.process_groups import init_process_group

        if self._group is not None:
            return
        port = find_free_port(self._host)
        world_size = 1 + self._ranks_per_engine * len(self.clients)
        offsets = {id(client): 1 + index * self._ranks_per_engine for index, client in enumerate(self.clients)}
        joining = submit(
            self.clients,
            lambda client: client.init_weights_update_group(
                master_address=self._host,
                master_port=port,
                rank_offset=offsets[id(client)],
                world_size=world_size,
                group_name=GROUP_NAME,
                backend=self._backend,
            ),
        )
        try:
            self._group = init_process_group(
                backend=self._backend,
                init_method=f"tcp://{self._host}:{port}",
                world_size=world_size,
                rank=0,
                group_name=GROUP_NAME,
                timeout_s=self._timeout_s,
            )
        except RuntimeError as error:
            refusals = [reply.exception() for reply in joining if reply.done() and reply.exception() is not None]
            raise (refusals or [error])[0] from None
        wait_all(joining, self._timeout_s)

    def send(self, bucket: Bucket, version: str, submit: Submit) -> None:
        """Announce the bucket to all engines, broadcast its tensors in order, wait for all replies."""
        names = [name for name, _ in bucket]
        dtypes = [str(tensor.dtype).removeprefix("torch.") for _, tensor in bucket]
        shapes = [list(tensor.shape) for _, tensor in bucket]
        replies = submit(
            self.clients,
            lambda client: client.update_weights_from_distributed(
                names=names,
                dtypes=dtypes,
                shapes=shapes,
                group_name=GROUP_NAME,
                flush_cache=False,
                weight_version=version,
            ),
        )
        failure = self._broadcast(bucket, replies)
        if failure is not None:
            raise failure
        wait_all(replies, self._timeout_s)

    def _broadcast(self, bucket: Bucket, replies: list[Future]) -> Exception | None:
        """Send the tensors in order. Returns what went wrong, without the frames of the error: they would keep the group,
        and so the connections on which engines wait, open."""
        import torch.distributed as dist

        from slime.utils.process_groups import wire_view

        try:
            tensors = [wire_view(tensor.contiguous()) for _, tensor in bucket]
            sent = [dist.broadcast(tensor, src=0, group=self._group, async_op=True) for tensor in tensors]
            for work in sent:
                _wait_sent(work, replies)
        except Exception as error:
            return error.with_traceback(None)
        return None

    def disconnect(self, submit: Submit) -> None:
        """Leave the group on both sides; the next ``connect`` forms a new one."""
        import torch.distributed as dist

        if self._group is None:
            return
        # First, since it wakes engines that wait for a broadcast. The group's end waits for a broadcast of ours that hangs.
        leaving, self._group = [self._group], None
        dist.destroy_process_group(leaving[0])
        threading.Thread(target=leaving.clear, name="weight-group-end", daemon=True).start()
        for future in submit(
            self.clients, lambda client: client.destroy_weights_update_group(GROUP_NAME, timeout_s=CLEAN_UP_S)
        ):
            try:
                future.result()
            except Exception as error:  # a dead or new engine has no group; the reconnect decides
                logger.info("an engine could not leave the weight group: %s", error)


def _wait_sent(work, replies: list[Future]) -> None:
    """Wait for one broadcast, but not longer than until an engine answers that it does not take part."""
    pause_s = _FIRST_PAUSE_S
    while not work.is_completed():
        for reply in replies:
            if reply.done() and reply.exception() is not None:
                raise reply.exception()
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
    work.wait()
