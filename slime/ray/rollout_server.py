"""A served model: its engines on the rollout slots and the router in front of them."""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from slime.ray.engine_actor import START_DEADLINE_S, EngineActor
from slime.ray.placement_group import Slots
from slime.ray.router import Router

if TYPE_CHECKING:
    from slime.utils.engine_client import EngineClient

logger = logging.getLogger(__name__)

_ENGINE_SHARE = 0.2  # of a slot; trainer ranks take the rest
_IDLE_DEADLINE_S = 60.0  # requests that a round left behind are aborted, which takes an engine a step
_MEMORY_CALL_S = 300.0


class RolloutServer:
    """Starts engines and router, knows their addresses, stops them."""

    def __init__(self, args, slots: Slots, host: str):
        import ray

        self._args, self._host = args, host
        self.engine_urls: list[str] = []
        per_engine = args.rollout_num_gpus_per_engine
        actor_class = ray.remote(EngineActor)
        self._engines = [
            actor_class.options(**slots.options(first, _ENGINE_SHARE)).remote(args, rank, slots.device_ids[first])
            for rank, first in enumerate(range(0, args.rollout_num_engines * per_engine, per_engine))
        ]
        self._starting = [engine.start.remote(host) for engine in self._engines]
        self.router = Router(args, host)

    def wait_ready(self) -> None:
        """Wait for engines and router. Raises RuntimeError with the engine's log when one does not come up."""
        import ray

        self.router.start()
        try:
            self.engine_urls = ray.get(self._starting, timeout=START_DEADLINE_S + 60)
        except ray.exceptions.RayTaskError as error:
            raise RuntimeError(str(error.cause)) from None
        self.router.add_workers(self.engine_urls)
        logger.info("%d engine(s) %s behind the router %s", len(self.engine_urls), self.engine_urls, self.router.url)

    def release_memory(self) -> None:
        """Take all memory from the engines that share slots with the trainer, once they are idle."""
        self._on_shared(lambda client: (client.flush_cache(_IDLE_DEADLINE_S), client.release_memory_occupation()))

    def resume_memory(self, tags: list[str]) -> None:
        """Give the memory behind ``tags`` back to them; what is resident stays as it is."""
        self._on_shared(lambda client: client.resume_memory_occupation(tags))

    def _on_shared(self, call: Callable[[EngineClient], object]) -> None:
        from slime.utils.engine_client import EngineClient

        def on_one(url: str) -> None:
            with EngineClient(url, timeout_s=_MEMORY_CALL_S) as client:
                call(client)

        shared = self.engine_urls[: self._args.num_shared_engines]
        with ThreadPoolExecutor(max(1, len(shared))) as pool:
            list(pool.map(on_one, shared))

    def dead_engines(self) -> list[str]:
        """URLs of engines whose process ended, each with the end of its log."""
        import ray

        alive = ray.get([engine.is_alive.remote() for engine in self._engines], timeout=60)
        dead = [index for index, is_alive in enumerate(alive) if not is_alive]
        return [
            f"{self.engine_urls[index]}:\n{ray.get(self._engines[index].log_tail.remote(), timeout=60)}"
            for index in dead
        ]

    def stop(self) -> None:
        """End engines and router; safe to call twice."""
        import ray

        stopping = [engine.stop.remote() for engine in self._engines]
        self.router.stop()
        ray.wait(stopping, num_returns=len(stopping), timeout=8)
        for engine in self._engines:
            ray.kill(engine)
        self._engines = []
