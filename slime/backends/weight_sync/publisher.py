"""One weight update: the envelope around the buckets, whatever carries them.

Pause all engines, flush their caches, begin, send each bucket over every transport, end, continue. Engines always continue,
also after a failure, and a failed update leaves no open window and no stale connection, so that the next one starts clean.
It does not know which model it carries.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
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
_CLEAN_UP_S = 10.0


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
    """

    def __init__(self, transports: list[Transport], *, buffer_bytes: int, timeout_s: float):
        self.clients = [client for transport in transports for client in transport.clients]
        self._transports = transports
        self._buffer_bytes, self._timeout_s = buffer_bytes, timeout_s
        self._pool = ThreadPoolExecutor(max_workers=max(1, len(self.clients)), thread_name_prefix="weight-sync")

    def update(self, named_tensors: Iterable[tuple[str, torch.Tensor]], version: str) -> dict[str, float]:
        """Bring every engine to the given weights. Returns {"bytes", "buckets"} of what was sent.

        Raises:
            RuntimeError: an engine refused or did not answer in time; engines keep running, the next update reconnects.
        """
        started = time.monotonic()
        try:
            for transport in self._transports:
                transport.connect(self._submit)
            self._on_all(lambda client: client.pause(PAUSE_MODE))
            self._on_all(lambda client: client.flush_cache(_FLUSH_DEADLINE_S))
            self._on_all(lambda client: client.begin_weight_update())
            stats = self._send(named_tensors, version)
            self._on_all(lambda client: client.end_weight_update())
            self._on_all(lambda client: client.continue_generation())
        except Exception as error:
            self._recover()
            raise RuntimeError(
                f"weight update to version {version} failed after {time.monotonic() - started:.1f} s: {error}. If this is a "
                "time-out: sync less often (--update-weights-interval) or look at the engine logs in the run directory"
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

    def _recover(self) -> None:
        """After a failure: drop connections, close the window that SGLang would refuse to open again, let engines go on."""
        for transport in self._transports:
            transport.disconnect(self._submit)
        self._try_on_all(lambda client: client.end_weight_update())
        self._try_on_all(lambda client: client.continue_generation())

    def _on_all(self, call: Call) -> None:
        wait_all(self._submit(self.clients, call), self._timeout_s + 30)

    def _try_on_all(self, call: Call) -> None:
        for future in self._submit(self.clients, call):
            try:
                future.result(_CLEAN_UP_S)
            except Exception as error:  # an engine that is gone cannot be tidied up
                logger.warning("after a failed weight update: %s", error)

    def _submit(self, clients: list[EngineClient], call: Call) -> list[Future]:
        return [self._pool.submit(call, client) for client in clients]


def wait_all(futures: list[Future], timeout_s: float) -> None:
    """Wait for all; the first failure is raised when all have ended, so that nothing of this step runs on."""
    failure: BaseException | None = None
    for future in futures:
        try:
            future.result(timeout_s)
        except Exception as error:
            failure = failure or error
    if failure is not None:
        raise failure
