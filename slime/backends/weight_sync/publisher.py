"""One weight update: the envelope around the buckets, whatever carries them.

Pause all engines, flush their caches, begin, send each bucket over every transport, end, compare versions, continue. Engines always
continue, also after a failure, and a failed update leaves no open window and no stale connection, so that the next one starts clean.
It does not know which model it carries.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Protocol

from slime.backends.weight_sync.bucket import buckets

if TYPE_CHECKING:
    import torch

    from slime.utils.engine_client import EngineClient

    Bucket = list[tuple[str, torch.Tensor]]

logger = logging.getLogger(__name__)

# Requests in flight are put back and continue under the new weights instead of being cut.
PAUSE_MODE = "retract"
_FLUSH_DEADLINE_S = 60.0
CLEAN_UP_S = 5.0
REPLY_GRACE_S = 30.0


class Transport(Protocol):
    """Carries buckets to its engines; ``submit`` runs a call on each of them at once."""

    clients: list[EngineClient]

    def connect(self, submit: Submit) -> None:
        """Make sure that the engines can be reached; called at the start of every update."""

    def send(self, bucket: Bucket, version: str, submit: Submit) -> None:
        """Return when every engine holds the bucket's tensors under ``version``."""

    def disconnect(self, submit: Submit) -> None:
        """Drop whatever a failed update may have left behind. Does not raise."""


Call = Callable[["EngineClient"], object]
Submit = Callable[[list["EngineClient"], Call], list[Future]]


class WeightPublisher:
    """Brings the engines of all ``transports`` to the same weights.

    Args:
        buffer_bytes: bound of one bucket.
        timeout_s: deadline of every single call.
        clients: more engines, which get no buckets: only what `finish` of an update brings.
    """

    def __init__(
        self,
        transports: list[Transport],
        *,
        buffer_bytes: int,
        timeout_s: float,
        clients: Sequence[EngineClient] = (),
    ):
        self.clients = [*clients, *(client for transport in transports for client in transport.clients)]
        self._transports = transports
        self._buffer_bytes, self._timeout_s = buffer_bytes, timeout_s
        self._pool = self._new_pool()

    def update(
        self, named_tensors: Iterable[tuple[str, torch.Tensor]] | None, version: str, finish: Call | None = None
    ) -> dict[str, float]:
        """Bring every engine to the given weights. Returns {"bytes", "buckets"} of what was sent.

        Args:
            named_tensors: None leaves the engines' weights as they are.
            finish: called for each engine when its weights are there, before it goes on.

        Raises:
            RuntimeError: an engine refused or did not answer in time; engines keep running, the next update reconnects.
        """
        started = time.monotonic()
        try:
            for transport in self._transports:
                transport.connect(self._submit)
            self._on_all(lambda client: client.pause(PAUSE_MODE))
            self._on_all(lambda client: client.flush_cache(_FLUSH_DEADLINE_S))
            stats = {"bytes": 0, "buckets": 0}
            if named_tensors is not None:
                self._on_all(lambda client: client.begin_weight_update())
                stats = self._send(named_tensors, version)
                self._on_all(lambda client: client.end_weight_update())
            if finish is not None:
                self._on_all(finish)
            self._on_all(lambda client: _check_version(client, version))
            self._on_all(lambda client: client.continue_generation())
        except Exception as error:
            failed_after_s = time.monotonic() - started
            silent = self._recover()
            raise RuntimeError(
                f"weight update to version {version} failed after {failed_after_s:.1f} s: {error}. "
                + (f"Engines that do not answer any more: {', '.join(silent)}. " if silent else "")
                + "Look at the engine logs in the run directory; a slow network needs a longer --distributed-timeout-minutes"
            ) from error
        return stats

    def close(self) -> None:
        for transport in self._transports:
            transport.disconnect(self._submit)
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _send(self, named_tensors: Iterable[tuple[str, torch.Tensor]], version: str) -> dict[str, float]:
        num_bytes = num_buckets = 0
        for bucket in buckets(named_tensors, self._buffer_bytes):
            for transport in self._transports:
                transport.send(bucket, version, self._submit)
            num_bytes += sum(tensor.numel() * tensor.element_size() for _, tensor in bucket)
            num_buckets += 1
        return {"bytes": num_bytes, "buckets": num_buckets}

    def _recover(self) -> list[str]:
        """After a failure: drop connections, close the window that SGLang would refuse to open again, let engines go on.

        Returns: the addresses of the engines that do not answer. Takes seconds, however long they hang.
        """
        self._pool.shutdown(wait=False, cancel_futures=True)  # calls to an engine that hangs keep their threads
        self._pool = self._new_pool()
        for transport in self._transports:
            transport.disconnect(self._submit)
        answers = [future.result() for future in self._submit(self.clients, _tidy)]
        return [client.base_url for client, is_there in zip(self.clients, answers, strict=True) if not is_there]

    def _on_all(self, call: Call) -> None:
        wait_all(self._submit(self.clients, call), self._timeout_s)

    def _new_pool(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(max_workers=max(1, len(self.clients)), thread_name_prefix="weight-sync")

    def _submit(self, clients: list[EngineClient], call: Call) -> list[Future]:
        return [self._pool.submit(call, client) for client in clients]


def _check_version(client: EngineClient, version: str) -> None:
    served = client.weight_version()
    if served != version:
        raise RuntimeError(f"engine {client.base_url} serves version {served!r}")


def _tidy(client: EngineClient) -> bool:
    """Close an open window and let the engine generate. Returns whether it answers."""
    from slime.utils.engine_client import EngineError

    for call in (client.end_weight_update, client.continue_generation):
        try:
            call(timeout_s=CLEAN_UP_S)
        except EngineError as error:
            if error.status is None:
                return False
            logger.info("after a failed weight update: %s", error)  # such as: no window was open
    return True


def wait_all(futures: list[Future], timeout_s: float) -> None:
    """Wait for all; the first failure is raised when all have ended, so that nothing of this step runs on.

    Args:
        timeout_s: deadline of the calls themselves, which normally end by it with an error that says more.
    """
    failure: BaseException | None = None
    give_up_at = time.monotonic() + timeout_s + REPLY_GRACE_S
    for future in futures:
        try:
            future.result(max(0.0, give_up_at - time.monotonic()))
        except TimeoutError:
            failure = failure or RuntimeError(f"no answer from an engine within {timeout_s + REPLY_GRACE_S:g} s")
        except Exception as error:
            failure = failure or error
    if failure is not None:
        raise failure
