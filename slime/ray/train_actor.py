"""One training rank: a Ray actor around the Megatron actor of that rank. Fetches its shard, trains, sends weights."""

from __future__ import annotations

import socket
import time
import warnings

from slime.observability.progress import Progress


class TrainActor:
    """Rank ``rank`` of ``world_size``. Only the source rank (0) talks to the engines.

    Args:
        host: address under which the other ranks and the engines reach this rank's node.
    """

    def __init__(self, args, rank: int, world_size: int, host: str):
        self._args, self._rank, self._world_size, self._host = args, rank, world_size, host
        self._progress = Progress()
        self._actor = None
        self._weight_sync = None

    def warm_up(self) -> None:
        """Import what ``init`` needs; runs while engines start and prompts are read."""
        _quieten_libraries()
        from slime.backends.megatron_utils import actor

        actor.warm_up()

    def reserve_master(self) -> tuple[str, int]:
        """Address and port for the group's rendezvous, held until ``init`` binds it."""
        self._held_port = socket.socket()
        self._held_port.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._held_port.bind((self._host, 0))
        return self._host, self._held_port.getsockname()[1]

    def init(self, master_addr: str, master_port: int, num_rollout: int, load_dir: str | None) -> int:
        """Build model and optimizer and load weights. Returns the first rollout id that this rank would train."""
        from slime.backends.megatron_utils.actor import MegatronActor

        if self._rank == 0:
            self._held_port.close()
        self._args.num_rollout = num_rollout
        self._actor = MegatronActor(
            self._args, self._rank, self._world_size, master_addr, master_port, progress=self._progress
        )
        return self._actor.init(load_dir)

    def progress(self) -> dict:
        """Snapshot of the training that goes on; called while ``train`` runs."""
        return self._progress.snapshot()

    def train(self, rollout_id: int, shards: list) -> dict[str, dict]:
        """Train on this rank's shard; ``shards`` holds one boxed object reference per data-parallel rank."""
        import ray

        from slime.batching.transport import unpack

        started = time.monotonic()
        shard = unpack(ray.get(shards[self._actor.dp_rank].inner, timeout=self._args.stall_timeout))
        fetch_s = time.monotonic() - started
        metrics = self._actor.train(rollout_id, shard)
        if metrics:
            metrics["rollout"]["perf/data_fetch_time"] = fetch_s
        return metrics

    def update_weights(self, engine_urls: list[str], version: int) -> dict[str, float]:
        """Send the current weights to the engines as ``version``; the source rank sends and reports, the others return {}."""
        if self._rank != 0:
            return {}
        started = time.monotonic()
        sync = self._connected(engine_urls)
        stats = sync.update(self._actor.export_weights(), str(version))
        if self._args.check_weight_update_equal:
            self._check_equal(sync.clients, version)
        return {
            "perf/update_weights_time": time.monotonic() - started,
            "perf/update_weights_wire_bytes": stats["bytes"],
            "rollout/weight_version": version,
        }

    def _connected(self, engine_urls: list[str]):
        from slime.backends.weight_sync.distributed import DistributedWeightSync
        from slime.utils import device
        from slime.utils.engine_client import EngineClient

        if self._weight_sync is None:
            timeout_s = self._args.distributed_timeout_minutes * 60
            self._weight_sync = DistributedWeightSync(
                [EngineClient(url, timeout_s=timeout_s) for url in engine_urls],
                backend=device.process_group_backend(),
                host=self._host,
                ranks_per_engine=self._args.rollout_num_gpus_per_engine,
                buffer_bytes=self._args.update_weight_buffer_size,
                timeout_s=timeout_s,
            )
        return self._weight_sync

    def _check_equal(self, clients: list, version: int) -> None:
        """Compare what the trainer exports with what each engine holds, tensor by tensor."""
        from slime.utils.checksum import tensor_checksum

        expected = {name: tensor_checksum(tensor) for name, tensor in self._actor.export_weights()}
        for client in clients:
            held = client.weights_checker("checksum")["checksums"]
            wrong = sorted(name for name, checksum in expected.items() if held.get(name) != checksum)
            if wrong:
                raise RuntimeError(
                    f"--check-weight-update-equal: after the update to version {version} engine {client.base_url} "
                    f"differs from the trainer in {len(wrong)} of {len(expected)} tensors, first: {wrong[:5]}"
                )

    def save(self, directory: str) -> None:
        self._actor.save(directory)

    def save_hf(self, directory: str) -> None:
        self._actor.save_hf(directory)


def _quieten_libraries() -> None:
    """Leave out warnings that each rank of each run would repeat: optional kernels that are absent, torch's renamings."""
    warnings.filterwarnings("ignore", category=UserWarning, module=r"megatron\.")
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed")
