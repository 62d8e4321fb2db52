"""What train.py and train_async.py do in which order, with the verbs of the session written down instead of done."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

import train
import train_async
from slime.ray.session import Generation, Session


class TracedSession(Session):
    """A session without processes: what is due is decided by the real one."""

    trace: list[str] = []

    def __init__(self, args, looks_ahead: bool = False):
        super().__init__(args, looks_ahead)
        self.num_rollout, self._trainer = args.num_rollout, object()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def note(self, verb: str, rollout_id: int | None = None) -> None:
        self.trace.append(verb if rollout_id is None else f"{verb} {rollout_id}")

    def begin_generate(self, rollout_id):
        self.note("begin", rollout_id)
        self._has_begun = True
        return Generation(rollout_id, None, 0.0)

    def finish_generate(self, generation):
        if generation.batch is None:
            self.note("finish", generation.rollout_id)
            generation.batch = []
        return generation.batch

    def train(self, rollout_id, batch):
        self.note("train", rollout_id)

    def prepare_weights(self):
        self.note("write")

    def update_weights(self):
        self.note("sync")

    def save(self, rollout_id):
        self.note("save", rollout_id)

    def evaluate(self, rollout_id):
        self.note("eval", self.evaluation_step(rollout_id))

    def end_round(self, rollout_id):
        pass

    hand_over_to_trainer = hand_over_to_engines = end_round


@pytest.fixture
def run(monkeypatch):
    """``run(module, flags...)`` gives the trace of that loop."""

    def trace(module, **changes) -> list[str]:
        values = dict(num_rollout=4, async_buffer_size=1, update_weights_interval=1, eval_interval=None, save=None)
        values |= dict(
            save_interval=None, skip_eval_before_train=False, start_notes=[], colocate=False, mismatch_alarm=None
        )
        values |= dict(use_critic=False, keep_old_actor=False, rollout_function_path="slime.rollout.sglang_rollout.f")
        monkeypatch.setattr(module, "Session", TracedSession)
        monkeypatch.setattr(TracedSession, "trace", [])
        module.train(SimpleNamespace(offload_train=False, **(values | changes)))
        return TracedSession.trace

    return trace


def test_synchronous_loop_generates_trains_saves_and_syncs_in_turn(run):
    rounds = [[f"begin {i}", f"finish {i}", f"train {i}", f"save {i}", "sync"] for i in (0, 1)]
    assert run(train, num_rollout=2, save="folder", save_interval=1) == ["sync", *rounds[0], *rounds[1]]


def test_look_ahead_loop_writes_weights_under_a_generation_and_never_syncs_under_one(run):
    assert run(train_async, num_rollout=3) == [
        *("sync", "begin 0", "begin 1", "finish 0", "train 0", "write", "finish 1", "sync"),
        *("begin 2", "train 1", "write", "finish 2", "sync", "train 2", "write", "sync"),
    ]


@pytest.mark.parametrize(("num_rollout", "interval"), [(1, 1), (2, 2), (3, 2), (1, 5)])
@pytest.mark.parametrize("module", [train, train_async])
def test_fb_a09_loops_finish_their_last_round_and_sync_after_it(run, module, num_rollout, interval):
    trace = run(module, num_rollout=num_rollout, update_weights_interval=interval, async_buffer_size=2)
    assert [verb for verb in trace if verb.startswith("train")] == [f"train {i}" for i in range(num_rollout)]
    assert trace[-1] == "sync"


def test_saving_is_due_at_the_interval_and_after_the_last_round(run):
    trace = run(train, num_rollout=5, save="folder", save_interval=2)
    assert [verb for verb in trace if verb.startswith("save")] == ["save 1", "save 3", "save 4"]


@pytest.mark.parametrize("module", [train, train_async])
@pytest.mark.parametrize(
    ("changes", "steps"),
    [
        ({"eval_interval": 1}, [-1, 0, 1]),  # two evaluations of round 0
        ({"eval_interval": 1, "skip_eval_before_train": True}, [0, 1]),
        ({"eval_interval": 2}, [0, 1]),
        ({"eval_interval": 1, "num_rollout": 0}, [0]),
    ],
)
def test_no_two_evaluations_share_a_step(run, module, changes, steps):
    trace = run(module, **({"num_rollout": 2} | changes))
    assert [verb for verb in trace if verb.startswith("eval")] == [f"eval {step}" for step in steps]
