"""The objects that loops written in the field's style drive: `create_placement_groups`, `create_rollout_manager`, `create_training_models`.

They are handles on one `Session`, whose verbs do the work: engines and trainer start together, memory of shared slots moves by
itself, one checkpoint holds everything, metrics are written by the driver. So a loop of one's own on them trains as `train.py`
does; calls for what the session does anyway (offload, onload, saving the prompts) do nothing. What is called with `.remote` gives
references for `ray.get`; generation runs meanwhile, everything else is done when `.remote` returns. The run ends with the program.
"""

from __future__ import annotations

import atexit
import signal
import threading
from collections.abc import Callable
from typing import Any

from slime.ray.session import Generation, Session


class Run:
    """The session of a loop, and what it has begun."""

    def __init__(self, args):
        self.session = Session(args, looks_ahead=True)
        self.generations: dict[int, Generation] = {}
        self.trained: int | None = None  # a round whose line is not printed yet
        self._is_up = False

    def start(self) -> None:
        """Bring everything up; again: nothing."""
        if self._is_up:
            return
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, _interrupt)
        self.session.__enter__()
        self._is_up = True
        atexit.register(self.stop)
        args = self.session.args
        args.start_rollout_id = self.session.rounds().start

    def stop(self) -> None:
        if self._is_up:
            self._is_up = False
            try:
                self.end_round()
            finally:
                self.session.__exit__(None, None, None)

    def train(self, rollout_id: int) -> None:
        """All roles' steps of a round that was generated; for a round that is trained already: nothing."""
        generation = self.generations.pop(rollout_id, None)
        if generation is None:
            return
        self.end_round()
        self.session.train(rollout_id, self.session.finish_generate(generation))
        self.trained = rollout_id

    def end_round(self) -> None:
        if self.trained is not None:
            self.session.end_round(self.trained)
            self.trained = None


class _Call:
    """A method with `.remote`, as of a Ray actor."""

    def __init__(self, function: Callable):
        self.remote = function


class RolloutHandle:
    """What a loop does with the rollout side."""

    def __init__(self, run: Run):
        self._run = run
        self.generate, self.eval, self.dispose = _Call(self._generate), _Call(self._eval), _Call(self._dispose)
        for name in ("save", "load", "offload", "onload", "onload_weights", "onload_kv", "check_weights"):
            setattr(self, name, _Call(_done))

    def _generate(self, rollout_id: int):
        generation = self._run.session.begin_generate(rollout_id)
        self._run.generations[rollout_id] = generation
        return generation.reference

    def _eval(self, rollout_id: int):
        return _done(self._run.session.evaluate(rollout_id))

    def _dispose(self):
        self._run.end_round()
        return _done()  # processes end with the program: this reference has to be read first


class TrainHandle:
    """What a loop does with the ranks of a role; the actor's handle stands for all roles."""

    def __init__(self, run: Run, role: str):
        self._run, self._is_actor = run, role == "actor"

    def async_train(self, rollout_id: int, rollout_data_ref: Any = None, external_data: Any = None) -> list:
        """Train the round with every role that trains in it, whichever handle is asked first."""
        self._run.train(rollout_id)
        return [_done()]

    def update_weights(self) -> None:
        if self._is_actor:
            self._run.session.update_weights()

    def save_model(self, rollout_id: int, force_sync: bool = False) -> None:
        if self._is_actor:
            self._run.session.save(rollout_id)

    def onload(self) -> None:
        """The session wakes the trainer when it is its turn."""

    def offload(self) -> None:
        """And puts it to sleep."""

    def clear_memory(self) -> None:
        """Ranks keep no cache between rounds that others could use."""


def _done(value: Any = None, **_ignored):
    import ray

    return ray.put(value)


def _interrupt(*_) -> None:
    raise KeyboardInterrupt
