"""One rank of a train role: a Ray actor around the Megatron actor of that rank. Fetches its shard, trains, sends weights.

Engines on the trainer's slots get weights through shared memory, each from the rank on its first slot; all others from rank 0: by
broadcast, or, on a node without accelerators, through the memory that its processes share. With the disk transport all ranks
write a folder together, which rank 0 has every engine read.
"""

from __future__ import annotations

import gc
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from slime.observability.progress import Progress
from slime.utils.hook_calls import call_hook, oldest_call
from slime.utils.http_utils import HeldPort

if TYPE_CHECKING:
    from slime.utils.engine_client import EngineClient


class TrainActor:
    """Rank ``rank`` of ``world_size``.

    Args:
        args: of the role. host: address under which the other ranks and the engines reach this rank's node.
    """

    def __init__(self, args, rank: int, world_size: int, host: str, role: str = "actor"):
        self._args, self._rank, self._world_size, self._host, self._role = args, rank, world_size, host, role
        self._progress = Progress()
        self._actor = None
        self._publisher = None
        self._hook_engines: list[EngineClient] | None = None
        self._write_s = 0.0
        self._engines_have_base = args.lora_base == args.hf_checkpoint

    def warm_up(self) -> None:
        """Import what ``init`` needs; runs while engines start and prompts are read."""
        _quieten_libraries()
        from slime.backends.megatron_utils import actor

        actor.warm_up()

    def reserve_master(self) -> tuple[str, int]:
        """Address and port for the group's rendezvous, held until ``init`` binds it."""
        self._held_port = HeldPort(self._host)
        return self._host, self._held_port.port

    def init(self, master_addr: str, master_port: int, num_rollout: int, load_dir: str | None) -> int:
        """Build model and optimizer and load weights. Returns the first rollout id that this rank would train."""
        from slime.backends.megatron_utils.actor import MegatronActor

        if self._rank == 0:
            self._held_port.release()
        self._args.num_rollout = num_rollout
        where = (self._rank, self._world_size, master_addr, master_port)
        self._actor = MegatronActor(self._args, *where, role=self._role, progress=self._progress)
        start = self._actor.init(load_dir)
        gc.freeze()  # libraries and model need not be searched for garbage in every step
        return start

    def progress(self) -> dict:
        """Snapshot of the training that goes on; called while ``train`` runs."""
        return self._progress.snapshot() | oldest_call()

    def score(self, rollout_id: int, shards: list, old_version: int | None, *columns: dict) -> tuple[dict, dict]:
        """Run this role's forward passes alone; arguments and results as of ``train``."""
        from slime.batching.transport import pack

        return {}, pack(self._actor.score(rollout_id, self._fetch(shards), old_version))

    def train(self, rollout_id: int, shards: list, old_version: int | None, *columns: dict) -> tuple[dict, dict]:
        """Train on this rank's shard.

        Args:
            shards: one boxed object reference per data-parallel rank. columns: what other roles' ranks at this place gave.
        Returns: metrics, and the columns that other roles need.
        """
        from slime.batching.transport import pack, unpack

        started = time.monotonic()
        shard = self._fetch(shards)
        fetch_s = time.monotonic() - started
        metrics = self._actor.train(rollout_id, shard, [unpack(part) for part in columns], old_version)
        if metrics:
            metrics["rollout"][f"perf/{self._actor.role.time_prefix}data_fetch_time"] = fetch_s
        return metrics, pack(self._actor.columns)

    def loss(self, shards: list) -> float | None:
        """The loss of this model on samples that it does not train on, on the main rank."""
        return self._actor.loss(self._fetch(shards))

    def _fetch(self, shards: list) -> dict:
        import ray

        from slime.batching.transport import unpack

        return unpack(ray.get(shards[self._actor.dp_rank].inner, timeout=self._args.stall_timeout))

    def write_weights(self, engine_urls: list[str], version: int) -> None:
        """Write the current weights as the folder of ``version`` (disk transport), then call the user's hook; engines generate
        meanwhile. All ranks call it."""
        from slime.backends.weight_sync.disk import remove_unfinished, version_folder

        args, started, folder = self._args, time.monotonic(), version_folder(self._args, version)
        if self._rank == 0:
            remove_unfinished(args)
        try:
            self._actor.save_hf(folder.path)
        except Exception as error:
            raise RuntimeError(f"--update-weight-disk-dir: {folder.path} could not be written: {error}") from error
        if args.custom_update_weight_post_write_path is not None:
            self._hook_engines = self._hook_engines or self._clients(engine_urls)
            call_hook(args, "custom_update_weight_post_write_path", args, folder.path, list(self._hook_engines))
        self._write_s = time.monotonic() - started

    def update_weights(self, engine_urls: list[str], version: int, in_use: set[int]) -> dict[str, float]:
        """Send the current weights as ``version`` to the engines that are this rank's.

        Returns: metrics; {} of a rank without engines, which only gives its part of the weights to those that send.
        """
        self._actor.remember(version, in_use)
        if self._publisher is None:
            self._publisher = self._make_publisher(engine_urls)
        if self._args.update_weight_transport == "disk":
            return self._load_written(version)
        if self._args.lora_sync == "adapter":
            return self._update_adapters(version)
        started = time.monotonic()
        with self._actor.weights_in_place():
            if not self._publisher.clients:
                self._actor.help_export()
                return {}
            with _walked_to_the_end(self._actor.export_weights()) as weights:
                stats = self._publisher.update(weights, str(version))
        return {
            "perf/update_weights_time": time.monotonic() - started,
            "perf/update_weights_wire_bytes": stats["bytes"],
            "rollout/weight_version": version,
        }

    def _load_written(self, version: int) -> dict[str, float]:
        """Have the engines read the folder of ``version``, with which all ranks are done."""
        from slime.backends.weight_sync.disk import version_folder

        if not self._publisher.clients:
            return {}
        started, folder = time.monotonic(), version_folder(self._args, version)
        self._publisher.update(None, str(version), finish=folder.load_into)
        load_s, num_bytes = time.monotonic() - started, folder.num_bytes()
        if not self._args.update_weight_disk_keep_files:
            folder.remove()
        return {
            "perf/update_weights_time": self._write_s + load_s,
            "perf/update_weights_write_time": self._write_s,
            "perf/update_weights_wire_bytes": num_bytes,
            "rollout/weight_version": version,
        }

    def _update_adapters(self, version: int) -> dict[str, float]:
        """Send the adapters alone; the base goes ahead of the first ones where engines do not have it from --hf-checkpoint."""
        from slime.backends.weight_sync.adapters import AdapterSender, check_adapters

        args, started = self._args, time.monotonic()
        with self._actor.weights_in_place():
            adapters = self._actor.export_adapters()
            sends_base = not self._engines_have_base
            if not self._publisher.clients:
                if sends_base:
                    self._actor.help_export_base()
                return {}
            sender = AdapterSender(
                self._actor.adapter_config(), self._host, args.rollout_num_gpus_per_engine, f"{args.run_dir}/adapters"
            )
            with _walked_to_the_end(self._actor.export_base() if sends_base else None) as base:
                stats = self._publisher.update(
                    base, str(version), finish=lambda client: sender.send(client, adapters, str(version))
                )
            if args.check_weight_update_equal:
                check_adapters(self._publisher.clients, adapters)
        self._engines_have_base = True
        sent = sum(t.numel() * t.element_size() for tensors in adapters.values() for t in tensors.values())
        return {
            "perf/update_weights_time": time.monotonic() - started,
            "perf/update_weights_wire_bytes": stats["bytes"] + sent * len(self._publisher.clients),
            "rollout/weight_version": version,
        }

    def check_weights(self, version: int) -> None:
        """Compare what this rank's engines hold with the current weights (--check-weight-update-equal)."""
        from slime.backends.weight_sync.check import check_engines

        if self._args.lora_sync == "adapter":  # compared when they were sent
            return
        with self._actor.weights_in_place():
            if not self._publisher.clients:
                self._actor.help_export()
                return
            with _walked_to_the_end(self._actor.export_weights()) as weights:
                check_engines(self._publisher.clients, weights, version)

    def _make_publisher(self, engine_urls: list[str]):
        from slime.backends.weight_sync.distributed import BroadcastTransport
        from slime.backends.weight_sync.publisher import WeightPublisher
        from slime.backends.weight_sync.tensor import TensorTransport, largest_bucket
        from slime.utils import device

        args, transports = self._args, []
        timeout_s, per_engine = args.distributed_timeout_minutes * 60, args.rollout_num_gpus_per_engine
        buffer_bytes = args.update_weight_buffer_size
        if args.update_weight_transport == "disk":
            clients = self._clients(engine_urls if self._rank == 0 else [])
            return WeightPublisher([], clients=clients, buffer_bytes=buffer_bytes, timeout_s=timeout_s)
        shares_memory = args.update_weight_transport != "broadcast" and not device.has_accelerator()
        node = self._host if shares_memory else None
        here, elsewhere = engines_of_rank(self._rank, engine_urls, args.num_shared_engines, per_engine, node)
        if here:
            clients = self._clients(here)
            transports.append(TensorTransport(clients, ranks_per_engine=per_engine, timeout_s=timeout_s))
            buffer_bytes = largest_bucket(buffer_bytes, args.actor_num_gpus_per_node)
        if elsewhere:
            clients, backend = self._clients(elsewhere), device.process_group_backend()
            transports.append(
                BroadcastTransport(
                    clients, backend=backend, host=self._host, ranks_per_engine=per_engine, timeout_s=timeout_s
                )
            )
        return WeightPublisher(transports, buffer_bytes=buffer_bytes, timeout_s=timeout_s)

    def _clients(self, urls: list[str]) -> list[EngineClient]:
        from slime.utils.engine_client import EngineClient

        return [EngineClient(url, timeout_s=self._args.distributed_timeout_minutes * 60) for url in urls]

    def sleep(self) -> None:
        self._actor.sleep()

    def wake(self) -> None:
        self._actor.wake()

    def save(self, directory: str) -> None:
        self._actor.save(directory)

    def save_is_written(self) -> bool:
        return self._actor.save_is_written()

    def finish_save(self) -> None:
        self._actor.finish_save()

    def save_hf(self, directory: str) -> None:
        self._actor.save_hf(directory)


@contextmanager
def _walked_to_the_end(export: Iterator | None) -> Iterator[Iterator | None]:
    """Walk what is left of an export, after a failure too: other ranks take part in it to the end."""
    try:
        yield export
    finally:
        for _ in export or ():
            pass


def engines_of_rank(
    rank: int, urls: list[str], num_shared: int, per_engine: int, node: str | None = None
) -> tuple[list[str], list[str]]:
    """(engines that get rank ``rank``'s weights through shared memory, those that get them by broadcast).

    The first ``num_shared`` engines live on trainer slots; engine i starts at slot ``i * per_engine``, which is rank i's own.

    Args:
        node: address of rank 0's node if other engines there can read its memory.

    Example:
        Three engines of one slot, two trainer ranks, so two shared: rank 0 serves engine 0 and broadcasts to engine 2.
    """
    here = [url for index, url in enumerate(urls[:num_shared]) if index * per_engine == rank]
    if rank != 0:
        return here, []
    others = urls[num_shared:]
    near = [url for url in others if node is not None and urlsplit(url).hostname == node.strip("[]")]
    return here + near, [url for url in others if url not in near]


def _quieten_libraries() -> None:
    """Leave out warnings that each rank of each run would repeat: optional kernels that are absent, torch's renamings."""
    warnings.filterwarnings("ignore", category=UserWarning, module=r"megatron\.")
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed")
