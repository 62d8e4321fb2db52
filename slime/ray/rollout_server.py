"""A served model: its engines on the rollout slots and the router in front of them."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
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
        # Alone on one machine without devices to assign, an actor per engine would only be one more process to start.
        is_here = not args.has_gpu and sum(node["Alive"] for node in ray.nodes()) == 1
        make = EngineActor if is_here else functools.partial(_EngineElsewhere, slots)
        per_engine = args.rollout_num_gpus_per_engine
        first_slots = range(0, args.rollout_num_engines * per_engine, per_engine)
        self._engines = [make(args, rank, slots.device_ids[first]) for rank, first in enumerate(first_slots)]
        self._calls = ThreadPoolExecutor(max(1, len(self._engines)), thread_name_prefix="engines")
        self._starting = [self._calls.submit(engine.start, host) for engine in self._engines]
        self.router = Router(args, host)

    def wait_ready(self) -> None:
        """Wait for engines and router. Raises RuntimeError with the engine's log when one does not come up."""
        self.router.start()
        self.engine_urls = [starting.result(START_DEADLINE_S + 60) for starting in self._starting]
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
        alive = list(self._calls.map(lambda engine: engine.is_alive(), self._engines))
        dead = [index for index, is_alive in enumerate(alive) if not is_alive]
        return [f"{self.engine_urls[index]}:\n{self._engines[index].log_tail()}" for index in dead]

    def stop(self) -> None:
        """End engines and router; safe to call twice."""
        stopping = ThreadPoolExecutor(max(1, len(self._engines)))  # one that starts still may occupy its own thread
        ending = [stopping.submit(engine.stop) for engine in self._engines]
        self.router.stop()
        wait(ending, timeout=8)
        stopping.shutdown(wait=False)
        self._calls.shutdown(wait=False, cancel_futures=True)
        self._engines = []


class _EngineElsewhere:
    """An `EngineActor` in a process of Ray on its slot's node, with the methods of one in this process."""

    def __init__(self, slots: Slots, args, rank: int, base_device: int):
        import ray

        options = slots.options(rank * args.rollout_num_gpus_per_engine, _ENGINE_SHARE)
        self._actor = ray.remote(EngineActor).options(**options).remote(args, rank, base_device)

    def start(self, host: str) -> str:
        """Raises: RuntimeError as the engine's own `start` does."""
        import ray

        try:
            return ray.get(self._actor.start.remote(host), timeout=START_DEADLINE_S + 60)
        except ray.exceptions.RayTaskError as error:
            raise RuntimeError(str(error.cause)) from None

    def is_alive(self) -> bool:
        import ray

        return ray.get(self._actor.is_alive.remote(), timeout=60)

    def log_tail(self) -> str:
        import ray

        return ray.get(self._actor.log_tail.remote(), timeout=60)

    def stop(self) -> None:
        import ray

        ray.wait([self._actor.stop.remote()], timeout=8)
        ray.kill(self._actor)
