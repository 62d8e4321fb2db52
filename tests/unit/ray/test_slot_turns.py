"""Turns on shared slots: the order of a colocated round, with fake processes; which rank serves which engine."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from slime.ray import slot_turns
from slime.ray.slot_turns import SlotTurns
from slime.ray.train_actor import engines_of_rank


class Trace:
    """Stands for the manager's handle and for the actor group; records what is asked of them."""

    def __init__(self):
        self.events: list[str] = []
        self.offload = SimpleNamespace(remote=lambda: self.events.append("release"))
        self.onload = SimpleNamespace(remote=lambda tags: self.events.append("resume " + "+".join(tags)))

    def sleep(self):
        self.events.append("sleep")

    def wake(self):
        self.events.append("wake")


@pytest.fixture
def make_turns(monkeypatch):
    monkeypatch.setattr(slot_turns, "wait_for", lambda reference, what, deadline_s: None)

    def make(offload_train=True, offload_rollout=True, num_shared_engines=1, has_actor=True):
        trace = Trace()
        args = SimpleNamespace(
            offload_train=offload_train, offload_rollout=offload_rollout, num_shared_engines=num_shared_engines
        )
        return SlotTurns(args, trace, trace if has_actor else None), trace.events

    return make


def play(turns, events, num_rounds: int = 2) -> None:
    """The verbs as a run calls them, sync included."""
    turns.release_engines()
    events.append("build")
    turns.to_engines()
    events.append("sync")
    for _ in range(num_rounds):
        turns.to_generation()
        events.append("generate")
        turns.to_trainer()
        events.append("train")
        turns.to_engines()
        events.append("sync")


ROUND = ["resume kv_cache+cuda_graph", "generate", "release", "wake", "train", "sleep", "resume weights", "sync"]


def test_order_of_a_colocated_run(make_turns):
    turns, events = make_turns()
    play(turns, events)
    assert events == ["release", "build", "sleep", "resume weights", "sync", *ROUND, *ROUND]


def test_round_without_sync_and_evaluation_between_move_nothing_twice(make_turns):
    turns, events = make_turns()
    play(turns, events, num_rounds=1)
    del events[:]
    turns.to_generation()
    turns.to_generation()
    turns.to_engines()
    assert events == ["resume kv_cache+cuda_graph"]


def test_each_side_alone(make_turns):
    turns, events = make_turns(offload_rollout=False)
    play(turns, events, num_rounds=1)
    assert events == ["build", "sleep", "sync", "generate", "wake", "train", "sleep", "sync"]
    turns, events = make_turns(offload_train=False)
    play(turns, events, num_rounds=1)
    assert "sleep" not in events and "wake" not in events and events.count("release") == 2


@pytest.mark.parametrize(
    "changes",
    [
        {"offload_train": False, "offload_rollout": False},
        {"offload_train": False, "num_shared_engines": 0},
        {"offload_rollout": False, "has_actor": False},
    ],
)
def test_nothing_moves_when_nothing_is_shared(make_turns, changes):
    turns, events = make_turns(**changes)
    assert not turns.is_needed
    play(turns, events, num_rounds=1)
    assert events == ["build", "sync", "generate", "train", "sync"]


@pytest.mark.parametrize(
    ("num_shared", "per_engine", "expected"),
    [
        (0, 1, {0: ([], ["a", "b", "c"]), 1: ([], [])}),  # separate slots: all by broadcast
        (3, 1, {0: (["a"], []), 1: (["b"], []), 2: (["c"], []), 3: ([], [])}),
        (2, 1, {0: (["a"], ["c"]), 1: (["b"], [])}),  # one engine more than the trainer has slots
        (2, 2, {0: (["a"], ["c"]), 1: ([], []), 2: (["b"], []), 3: ([], [])}),
    ],
)
def test_each_engine_gets_its_weights_from_one_rank(num_shared, per_engine, expected):
    for rank, engines in expected.items():
        assert engines_of_rank(rank, ["a", "b", "c"], num_shared, per_engine) == engines


def test_engines_of_a_node_whose_memory_is_shared_need_no_broadcast():
    urls = ["http://10.0.0.1:1", "http://10.0.0.1:2", "http://10.0.0.2:1", "http://10.0.0.10:1"]
    assert engines_of_rank(0, urls, 1, 1, node="10.0.0.1") == (urls[:2], urls[2:])
    assert engines_of_rank(1, urls, 1, 1, node="10.0.0.1") == ([], [])
    assert engines_of_rank(0, ["http://[::1]:1"], 0, 1, node="[::1]") == (["http://[::1]:1"], [])
