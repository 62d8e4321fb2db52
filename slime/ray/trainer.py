"""The train roles of a run as one object: who works when, who sleeps meanwhile, what goes from one to the other.

A round is a list of stages; the tasks of a stage run at the same time. What a role's rank computes for others goes by object
reference to the rank at the same place, so the driver never holds it. Roles on the same slots are never awake together.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from slime.config.roles import role_args
from slime.ray.actor_group import ActorGroup
from slime.ray.placement_group import Slots
from slime.ray.wait import wait_for

Task = tuple[str, str]  # (role, verb)


def stages_of_round(args, rollout_id: int) -> list[list[Task]]:
    """What the roles do in one round.

    The critic learns the returns that the actor is trained with, so where these hold a KL penalty (``--kl-coef``) the actor
    scores first. On slots of its own the critic gives its values first, and both train at once.
    """
    if not args.use_critic:
        return [[("actor", "train")]]
    trains = ["critic", "actor"] if rollout_id >= args.num_critic_only_steps else ["critic"]
    actor_scores = [("actor", "score")] if args.kl_coef != 0 else []
    if args.critic_slots == "own":
        return [[("critic", "score"), *actor_scores], [(role, "train") for role in trains]]
    return [*([actor_scores] if actor_scores else []), *([(role, "train")] for role in trains)]


class Trainer:
    """The ranks of every train role.

    Args:
        slots: of each role, equally many.
    """

    def __init__(self, args, slots: dict[str, Slots], host: str):
        self._args = args
        roles = ("actor", "critic") if args.use_critic and args.num_rollout != 0 else ("actor",)
        self._groups = {role: ActorGroup(role_args(args, role), slots[role], host, role) for role in roles}
        self._takes_turns = len(roles) > 1 and args.critic_slots == "shared"
        #: Roles on slots that engines may share.
        self._on_actor_slots = roles if self._takes_turns else ("actor",)
        self._awake = set(roles)
        self._working: str = "actor"
        self._written_version: int | None = None  # whose folder holds the weights as they are now

    def init(self, num_rollout: int, load_dir: str | None, deadline_s: float) -> int:
        """Build every role's model. Returns the first round to train, on which all ranks of all roles agree."""
        starts = []
        for role, group in self._groups.items():
            references = group.begin_init(num_rollout, load_dir)
            starts += wait_for(references, f"the training ranks of the {role} to start", deadline_s=deadline_s)
            if self._takes_turns:
                self._put_to_sleep({role})
        assert len(set(starts)) == 1, f"training ranks disagree about the first round: {starts}"
        return starts[0]

    def train(
        self, rollout_id: int, batch: list, old_version: int | None, deadline_s: float, on_poll: Callable[[], Any]
    ) -> list[dict]:
        """One round of every role that trains in it.

        Args:
            batch: one boxed shard per data-parallel rank. old_version: of the weights that generated it, None: unknown.
        Returns: the reports of all ranks, see ``MegatronActor.train``; the critic's first.
        """
        self._written_version = None
        reports, columns = [], [[] for _ in range(len(self._groups["actor"]))]
        for stage in stages_of_round(self._args, rollout_id):
            self._wake_only({role for role, _ in stage})
            self._working = stage[-1][0]
            started = [self._groups[role].work(verb, rollout_id, batch, old_version, columns) for role, verb in stage]
            what = f"{', '.join(f'{verb} of the {role}' for role, verb in stage)} in round {rollout_id}"
            pending = [metrics for ranks in started for metrics, _ in ranks]
            reports += wait_for(pending, what, deadline_s=deadline_s, on_poll=on_poll)
            columns = [[*known, *(ranks[i][1] for ranks in started)] for i, known in enumerate(columns)]
        return reports

    def progress(self) -> dict:
        """Snapshot of the role that works."""
        return self._groups[self._working].progress()

    def write_weights(self, engine_urls: list[str], version: int, on_poll) -> None:
        """With the disk transport, write what ``update_weights`` will have engines read, unless that was done already."""
        if self._args.update_weight_transport == "disk" and self._written_version != version:
            self._groups["actor"].write_weights(engine_urls, version, on_poll)
            self._written_version = version

    def update_weights(self, engine_urls: list[str], version: int, in_use: set[int], on_poll) -> dict[str, float]:
        """Bring every engine to the actor's weights, see ``ActorGroup.update_weights``."""
        self.write_weights(engine_urls, version, on_poll)
        return self._groups["actor"].update_weights(engine_urls, version, in_use, on_poll)

    def loss(self, shards: list) -> float:
        """The actor's loss of samples that it does not train on; one boxed shard per data-parallel rank."""
        return self._groups["actor"].loss(shards)

    def save(self, directory: str) -> None:
        """Every role's state into one directory."""
        for role, group in self._groups.items():
            self._wake_only({role})
            group.save(directory)

    def save_is_written(self) -> bool:
        """Whether ``finish_save`` would return at once."""
        return all(group.save_is_written() for group in self._groups.values())

    def finish_save(self) -> None:
        """Complete a save that goes on in the background; roles may sleep."""
        for group in self._groups.values():
            group.finish_save()

    def save_hf(self, directory: str) -> None:
        self._groups["actor"].save_hf(directory)

    def sleep(self) -> None:
        """Have every role on the actor's slots give memory back, for the engines there."""
        self._put_to_sleep(self._awake & set(self._on_actor_slots))

    def wake(self) -> None:
        """Take memory back; roles that take turns do so when it is theirs."""
        if not self._takes_turns:
            self._wake_up({"actor"} - self._awake)

    def stop(self) -> None:
        for group in self._groups.values():
            group.stop()

    def _wake_only(self, roles: set[str]) -> None:
        if self._takes_turns:
            self._put_to_sleep(self._awake - roles)
            self._wake_up(roles - self._awake)

    def _put_to_sleep(self, roles: set[str]) -> None:
        for role in sorted(roles):
            self._groups[role].sleep()
        self._awake -= roles

    def _wake_up(self, roles: set[str]) -> None:
        for role in sorted(roles):
            self._groups[role].wake()
        self._awake |= roles
