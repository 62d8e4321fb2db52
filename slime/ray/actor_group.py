"""All ranks of one train role, seen from the driver as one object."""

from __future__ import annotations

from collections.abc import Callable

from slime.ray.observable import observable
from slime.ray.placement_group import Slots
from slime.ray.train_actor import TrainActor
from slime.ray.wait import wait_for

_RANK_SHARE = 0.4  # of a slot


class ActorGroup:
    """Creates one ``TrainActor`` per slot; every method is the same call on all ranks, with one answer."""

    def __init__(self, args, slots: Slots, host: str, role: str = "actor"):
        self._args = args
        env = {"env_vars": train_env(args)}
        actor_class = observable(TrainActor, ("progress",))
        self._ranks = [
            actor_class.options(runtime_env=env, **slots.options(rank, _RANK_SHARE)).remote(
                args, rank, len(slots), host, role
            )
            for rank in range(len(slots))
        ]
        for rank in self._ranks:
            rank.warm_up.remote()

    def begin_init(self, num_rollout: int, load_dir: str | None) -> list:
        """Start building the model on every rank. Returns references; each gives that rank's first rollout id."""
        address, port = wait_for(self._ranks[0].reserve_master.remote(), "the first training rank", deadline_s=600)
        return [rank.init.remote(address, port, num_rollout, load_dir) for rank in self._ranks]

    def work(self, verb: str, rollout_id: int, shards: list, old_version: int | None, columns: list[list]) -> list:
        """Start ``score`` or ``train`` of one round on every rank.

        Args:
            columns: for each rank, references to what it has to know of other roles.
        Returns: for each rank, references to its metrics and to its columns for other roles.
        """
        return [
            getattr(rank, verb).options(num_returns=2).remote(rollout_id, shards, old_version, *known)
            for rank, known in zip(self._ranks, columns, strict=True)
        ]

    def __len__(self) -> int:
        return len(self._ranks)

    def progress(self) -> dict:
        """Snapshot of the last rank's training: it holds the last pipeline stage, where a micro-batch's loss is computed."""
        return wait_for(self._ranks[-1].progress.remote(), "the trainer's progress", deadline_s=120)

    def write_weights(self, engine_urls: list[str], version: int, on_poll: Callable[[], None] | None = None) -> None:
        """Write the folder of ``version``, see ``TrainActor.write_weights``; a wait that is too long names the hook in it."""

        def poll() -> str | None:
            if on_poll is not None:
                on_poll()
            return self._oldest_hook() if self._args.custom_update_weight_post_write_path is not None else None

        self._on_all("write_weights", engine_urls, version, on_poll=poll)

    def _oldest_hook(self) -> str | None:
        calls = [rank.progress.remote() for rank in self._ranks]
        snapshots = wait_for(calls, "the trainer's progress", deadline_s=120)
        return next((snapshot["oldest hook"] for snapshot in snapshots if "oldest hook" in snapshot), None)

    def update_weights(
        self, engine_urls: list[str], version: int, in_use: set[int], on_poll: Callable[[], None] | None = None
    ) -> dict[str, float]:
        """Bring every engine to the current weights, called ``version`` from then on. Returns metrics: bytes of all ranks
        together, the longest time.

        Args:
            in_use: versions that generated rounds which are not trained yet.
            on_poll: called several times a second meanwhile; what it raises ends the wait.
        """
        replies = self._on_all("update_weights", engine_urls, version, in_use, on_poll=on_poll)
        if self._args.check_weight_update_equal:
            self._on_all("check_weights", version, on_poll=on_poll)
        per_rank = [metrics for metrics in replies if metrics]
        merged = {name: max(metrics[name] for metrics in per_rank) for name in (per_rank[0] if per_rank else ())}
        wire = "perf/update_weights_wire_bytes"
        return merged | ({wire: sum(metrics[wire] for metrics in per_rank)} if per_rank else {})

    def loss(self, shards: list) -> float:
        """The loss of samples that are not trained; one boxed shard per data-parallel rank."""
        (loss,) = [reply for reply in self._on_all("loss", shards) if reply is not None]
        return loss

    def sleep(self) -> None:
        """Have every rank give memory back, for the engines on its slot."""
        self._on_all("sleep")

    def wake(self) -> None:
        self._on_all("wake")

    def save(self, directory: str) -> None:
        self._on_all("save", directory)

    def save_is_written(self) -> bool:
        """Whether ``finish_save`` would return at once."""
        return all(self._on_all("save_is_written"))

    def finish_save(self) -> None:
        """Complete a save that goes on in the background."""
        self._on_all("finish_save")

    def save_hf(self, directory: str) -> None:
        self._on_all("save_hf", directory)

    def stop(self) -> None:
        import ray

        for rank in self._ranks:
            ray.kill(rank)
        self._ranks = []

    def _on_all(self, method: str, *arguments, on_poll: Callable[[], None] | None = None) -> list:
        calls = [getattr(rank, method).remote(*arguments) for rank in self._ranks]
        what = f"{method} on the training ranks"
        return wait_for(calls, what, deadline_s=self._args.stall_timeout, on_poll=on_poll)


def train_env(args) -> dict[str, str]:
    """Environment of training ranks: the usual one, the defaults that kernels want, the user's additions last."""
    from slime.ray.boot import worker_env

    defaults = {"NCCL_CUMEM_ENABLE": "0", "NVTE_FP8_BLOCK_SCALING_FP32_SCALES": "1"}
    if args.deterministic_mode:
        defaults |= {"NCCL_ALGO": "Ring", "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0", "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    return worker_env(args) | defaults | {name: str(value) for name, value in (args.train_env_vars or {}).items()}
