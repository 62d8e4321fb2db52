"""Transport by broadcast: the trainer's source rank and every engine rank share one process group outside WORLD."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from slime.backends.weight_sync.publisher import Submit, wait_all

if TYPE_CHECKING:
    from slime.backends.weight_sync.publisher import Bucket
    from slime.utils.engine_client import EngineClient

logger = logging.getLogger(__name__)

GROUP_NAME = "slime-pp_0"


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
        from slime.utils.distributed_utils import init_process_group
        from slime.utils.http_utils import find_free_port

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
        self._group = init_process_group(
            backend=self._backend,
            init_method=f"tcp://{self._host}:{port}",
            world_size=world_size,
            rank=0,
            group_name=GROUP_NAME,
            timeout_s=self._timeout_s,
        )
        wait_all(joining, self._timeout_s)

    def send(self, bucket: Bucket, version: str, submit: Submit) -> None:
        """Announce the bucket to all engines, broadcast its tensors in order, wait for all replies."""
        import torch.distributed as dist

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
        sent = [dist.broadcast(tensor.contiguous(), src=0, group=self._group, async_op=True) for _, tensor in bucket]
        for work in sent:
            work.wait()
        wait_all(replies, self._timeout_s + 30)

    def disconnect(self, submit: Submit) -> None:
        """Leave the group on both sides; the next ``connect`` forms a new one."""
        import torch.distributed as dist

        if self._group is None:
            return
        dist.destroy_process_group(self._group)  # first: it wakes engines that wait for a broadcast
        self._group = None
        for future in submit(self.clients, lambda client: client.destroy_weights_update_group(GROUP_NAME)):
            try:
                future.result(10.0)
            except Exception as error:  # a dead or new engine has no group; the reconnect decides
                logger.info("an engine could not leave the weight group: %s", error)
