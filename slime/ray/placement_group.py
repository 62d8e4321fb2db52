"""Which slot runs what: one Ray placement group for the whole run, cut into the shares of actor, critic and rollout.

A bundle is one slot (``{"GPU": 1, "CPU": 1}``). Bundles are ordered by node and device, so consecutive ranks sit together.
"""

from __future__ import annotations

import logging
import socket
import time
from dataclasses import dataclass

logger = logging.getLogger(__name__)

_REPORT_EVERY_S = 30.0
_READY_DEADLINE_S = 3600.0  # an autoscaler may need this long to bring nodes


@dataclass(frozen=True)
class Slots:
    """A share of the placement group: logical slot i is bundle ``bundle_indices[i]`` on device ``device_ids[i]``."""

    group: object
    bundle_indices: tuple[int, ...]
    device_ids: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.bundle_indices)

    def options(self, index: int, share: float) -> dict:
        """Ray actor options that place an actor on slot ``index`` with ``share`` of its GPU and CPU."""
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        strategy = PlacementGroupSchedulingStrategy(
            placement_group=self.group, placement_group_bundle_index=self.bundle_indices[index]
        )
        return {"num_gpus": share, "num_cpus": share, "scheduling_strategy": strategy}


def layout(args) -> tuple[int, int]:
    """(number of bundles, offset of the first rollout bundle) of a run; a critic's own bundles are the last ones.

    Example:
        16 trainer slots and 32 rollout slots -> (48, 16); the same with ``--debug-train-only`` -> (16, 0).
    """
    bundles, offset = _without_critic(args)
    return bundles + args.num_critic_slots, offset


def _without_critic(args) -> tuple[int, int]:
    num_actor = args.actor_num_nodes * args.actor_num_gpus_per_node
    num_rollout = args.rollout_num_gpus or 0
    if args.debug_train_only:
        return num_actor, 0
    if args.rollout_external:
        return num_actor, 0 if args.debug_rollout_only else num_actor
    if args.debug_rollout_only:
        return num_rollout, 0
    if args.colocate:
        return max(num_actor, num_rollout), 0
    return num_actor + num_rollout, num_actor


def create_slots(args) -> dict[str, Slots]:
    """Reserve the run's slots: of the actor, of the critic (the actor's, or its own) and of the rollout."""
    num_bundles, rollout_offset = layout(args)
    if num_bundles == 0:
        return dict.fromkeys(("actor", "critic", "rollout"), Slots(None, (), ()))
    group = _reserve(num_bundles)
    order = _bundle_order(group, num_bundles)
    indices, devices = tuple(index for index, _ in order), tuple(device for _, device in order)
    num_actor = 0 if args.debug_rollout_only else args.actor_num_nodes * args.actor_num_gpus_per_node
    num_critic = args.num_critic_slots
    end = num_bundles - num_critic
    actor = Slots(group, indices[:num_actor], devices[:num_actor])
    critic = Slots(group, indices[end:], devices[end:]) if num_critic else actor
    rollout = Slots(group, indices[rollout_offset:end], devices[rollout_offset:end])
    return {"actor": actor, "critic": critic, "rollout": rollout}


def _reserve(num_bundles: int):
    import ray
    from ray.util.placement_group import placement_group

    group = placement_group([{"GPU": 1, "CPU": 1}] * num_bundles, strategy="PACK")
    waited_since = time.monotonic()
    while not group.wait(timeout_seconds=_REPORT_EVERY_S):
        waited_s = time.monotonic() - waited_since
        total, free = ray.cluster_resources().get("GPU", 0), ray.available_resources().get("GPU", 0)
        evidence = f"waited {waited_s:.0f} s for {num_bundles} slots; the cluster has {total:g}, {free:g} free"
        if waited_s > _READY_DEADLINE_S:
            raise RuntimeError(
                f"{evidence}. Lower --actor-num-gpus-per-node, --actor-num-nodes or --rollout-num-gpus, or add nodes"
            )
        logger.warning(evidence)
    return group


def _bundle_order(group, num_bundles: int) -> list[tuple[int, int]]:
    """[(bundle index, device id)] sorted by node address and device, found by a probe task on each bundle."""
    import ray
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    num_nodes = sum(1 for node in ray.nodes() if node["Alive"])
    if num_nodes == 1 and not _has_accelerator():
        return [(index, index) for index in range(num_bundles)]  # logical slots of one machine have no order to find

    @ray.remote(num_gpus=1, num_cpus=1)
    def probe() -> tuple[str, int]:
        return ray.util.get_node_ip_address(), int(ray.get_gpu_ids()[0])

    found = ray.get(
        [
            probe.options(
                scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index)
            ).remote()
            for index in range(num_bundles)
        ],
        timeout=300,
    )
    keyed = sorted((_address_key(address), device, index) for index, (address, device) in enumerate(found))
    return [(index, device) for _, device, index in keyed]


def _has_accelerator() -> bool:
    import ray

    return any(name.startswith("accelerator_type:") for name in ray.cluster_resources())


def _address_key(address: str) -> tuple:
    """Sort key of a node address: by number for IPv4, resolved names likewise, anything else by its characters."""
    try:
        return (0, *(int(part) for part in socket.gethostbyname(address).split(".")))
    except (OSError, ValueError):
        return (1, *(ord(character) for character in address))


# ---- for loops written in the field's style, see slime.ray.loop_handles -------------------------------------------------


def create_placement_groups(args) -> dict:
    """The run of `args` by role ("actor", "critic", "rollout"); its slots are reserved when it starts."""
    from slime.ray.loop_handles import Run

    return dict.fromkeys(("actor", "critic", "rollout"), Run(args))


def create_rollout_manager(args, pg, **_options) -> tuple:
    """Start the run. Returns (handle of the rollout side, rounds of an epoch, None where `--num-rollout` drives the run)."""
    from slime.ray.loop_handles import RolloutHandle

    pg.start()
    return RolloutHandle(pg), pg.session.num_rollout_per_epoch


def create_training_models(args, pgs: dict, rollout_manager, **_options) -> tuple:
    """(handle of the actor, of the critic or None). `args.start_rollout_id` and `args.num_rollout` say which rounds are left."""
    from slime.ray.loop_handles import TrainHandle

    run = pgs["actor"]
    return TrainHandle(run, "actor"), TrainHandle(run, "critic") if args.use_critic else None
