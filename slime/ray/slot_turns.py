"""Whose turn it is on slots that trainer and engines share, and what has to move when it changes.

Order of a round: engines generate -> release weights and KV cache -> the trainer wakes, trains, sleeps -> engines take their weights
back -> (weight sync) -> engines take the KV cache back when they next generate. So KV cache and training state never exist at once.
Every verb does nothing when there is nothing to move, also when it is called twice.
"""

from __future__ import annotations

from slime.ray.wait import wait_for

_WEIGHTS = ("weights",)
_CACHES = ("kv_cache", "cuda_graph")
_DEADLINE_S = 600.0


class SlotTurns:
    """Turns of one run.

    Args:
        manager: handle of the RolloutManager. trainer: the Trainer, None when nothing is trained.
    """

    def __init__(self, args, manager, trainer):
        self._manager, self._trainer = manager, trainer
        self._moves_trainer = args.offload_train and trainer is not None
        self._moves_engines = args.offload_rollout and args.num_shared_engines > 0
        self._released: set[str] = set()
        self._is_asleep = False

    @property
    def is_needed(self) -> bool:
        """Whether anything ever moves in this run."""
        return self._moves_trainer or self._moves_engines

    def to_trainer(self) -> None:
        self.release_engines()
        if self._is_asleep:
            self._trainer.wake()
            self._is_asleep = False

    def to_engines(self) -> None:
        if self._moves_trainer and not self._is_asleep:
            self._trainer.sleep()
            self._is_asleep = True
        self._resume(_WEIGHTS)

    def to_generation(self) -> None:
        self._resume(_WEIGHTS)
        self._resume(_CACHES)

    def release_engines(self) -> None:
        """Take all memory from the engines; the trainer is not touched."""
        if self._moves_engines and not self._released:
            self._wait(self._manager.offload.remote(), "engines to release their memory")
            self._released = {*_WEIGHTS, *_CACHES}

    def _resume(self, tags: tuple[str, ...]) -> None:
        if self._released & set(tags):
            self._wait(self._manager.onload.remote(list(tags)), f"engines to take back {', '.join(tags)}")
            self._released -= set(tags)

    def _wait(self, reference, what: str) -> None:
        wait_for(reference, what, deadline_s=_DEADLINE_S)
