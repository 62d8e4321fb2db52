"""Who trains when, who sleeps meanwhile and what reaches whom, with fake ranks; what the driver makes of the reports."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from slime.ray import trainer as trainer_module
from slime.ray.round_report import merged
from slime.ray.trainer import Trainer, stages_of_round

CRITIC, ACTOR, SCORES = [("critic", "train")], [("actor", "train")], [("actor", "score")]


def make_args(**changes):
    args = dict(use_critic=True, num_critic_only_steps=0, kl_coef=0.0, critic_slots="shared", num_rollout=5)
    args |= dict(update_weight_transport="nccl")
    return SimpleNamespace(**(args | changes))


@pytest.mark.parametrize(
    ("changes", "rollout_id", "expected"),
    [
        ({"use_critic": False, "kl_coef": 0.1}, 0, [ACTOR]),
        ({}, 0, [CRITIC, ACTOR]),
        ({"num_critic_only_steps": 2}, 1, [CRITIC]),
        ({"num_critic_only_steps": 2}, 2, [CRITIC, ACTOR]),
        ({"num_critic_only_steps": 9}, 4, [CRITIC]),
        ({"kl_coef": 0.1}, 0, [SCORES, CRITIC, ACTOR]),
        ({"kl_coef": 0.1, "num_critic_only_steps": 1}, 0, [SCORES, CRITIC]),
        ({"critic_slots": "own"}, 0, [[("critic", "score")], CRITIC + ACTOR]),
        ({"critic_slots": "own", "kl_coef": 0.1}, 0, [[("critic", "score"), *SCORES], CRITIC + ACTOR]),
        ({"critic_slots": "own", "num_critic_only_steps": 1}, 0, [[("critic", "score")], CRITIC]),
    ],
)
def test_stages_of_a_round(changes, rollout_id, expected):
    assert stages_of_round(make_args(**changes), rollout_id) == expected


class Group:
    """Two fake ranks of a role; every call is an event."""

    def __init__(self, args, slots, host, role):
        self.role, self.events = role, slots

    def __len__(self):
        return 2

    def begin_init(self, num_rollout, load_dir):
        self.events.append(f"{self.role} init")
        return [load_dir, load_dir]

    def work(self, verb, rollout_id, shards, old_version, columns):
        self.events.append((f"{self.role} {verb} {old_version}", columns))
        return [({"rank": i}, f"{self.role}{i}") for i in range(2)]

    def __getattr__(self, name):
        return lambda *arguments: self.events.append(" ".join([self.role, name, *map(str, arguments)]))


@pytest.fixture
def make_trainer(monkeypatch):
    monkeypatch.setattr(trainer_module, "ActorGroup", Group)
    monkeypatch.setattr(trainer_module, "role_args", lambda args, role: args)
    monkeypatch.setattr(trainer_module, "wait_for", lambda references, what, **_: references)

    def make(**changes):
        events = []
        return Trainer(make_args(**changes), {"actor": events, "critic": events}, "host"), events

    return make


def test_roles_on_the_same_slots_are_never_awake_together(make_trainer):
    trainer, events = make_trainer()
    assert trainer.init(5, 3, 1.0) == 3
    for rollout_id in (3, 4):
        trainer.wake()
        reports = trainer.train(rollout_id, [], 7, 1.0, None)
        trainer.save("folder")
        trainer.sleep()
    assert reports == [{"rank": 0}, {"rank": 1}] * 2
    start = ["actor init", "actor sleep", "critic init", "critic sleep"]
    train = ["critic wake", ("critic train 7", [[], []]), "critic sleep"]
    train += ["actor wake", ("actor train 7", [["critic0"], ["critic1"]])]
    save = ["actor save folder", "actor sleep", "critic wake", "critic save folder", "critic sleep"]
    assert events == [*start, *train, *save, *train, *save]


def test_without_sleep_between_rounds_nothing_moves_twice(make_trainer):
    """As in the look-ahead loop."""
    trainer, events = make_trainer(num_critic_only_steps=1)
    trainer.init(5, 0, 1.0)
    del events[:]
    for rollout_id in range(2):
        trainer.train(rollout_id, [], None, 1.0, None)
    moves = [event for event in events if isinstance(event, str)]
    assert moves == ["critic wake", "critic sleep", "actor wake"]


def test_critic_on_its_own_slots_sleeps_never(make_trainer):
    trainer, events = make_trainer(critic_slots="own", kl_coef=0.1)
    trainer.init(5, 0, 1.0)
    trainer.sleep()
    trainer.wake()
    trainer.train(0, [], None, 1.0, None)
    known = [["critic0", "actor0"], ["critic1", "actor1"]]
    assert events == [
        *("actor init", "critic init", "actor sleep", "actor wake"),
        *(("critic score None", [[], []]), ("actor score None", [[], []])),
        *(("critic train None", known), ("actor train None", known)),
    ]


def test_run_without_training_has_no_critic(make_trainer):
    trainer, events = make_trainer(num_rollout=0)
    trainer.init(0, 0, 1.0)
    assert events == ["actor init"]


def test_reports_of_all_roles_make_one_line_per_step():
    critic = {"steps": {4: {"train/critic-value_loss": 1.0}}, "rollout": {"rollout/values": 0.5, "rollout/kl": 0.0}}
    actor = {"steps": {4: {"train/pg_loss": 2.0}, 5: {"train/pg_loss": 3.0}}, "rollout": {"rollout/kl": 0.25}}
    steps, rollout = merged([{}, critic, actor, {}])
    assert steps == {4: {"train/critic-value_loss": 1.0, "train/pg_loss": 2.0}, 5: {"train/pg_loss": 3.0}}
    assert rollout == {"rollout/values": 0.5, "rollout/kl": 0.25}


def test_disk_transport_writes_a_version_once_and_anew_after_training(make_trainer):
    trainer, events = make_trainer(use_critic=False, update_weight_transport="disk")
    trainer.write_weights([], 1, None)
    trainer.update_weights([], 1, set(), None)
    written, loaded = "actor write_weights [] {} None", "actor update_weights [] {} set() None"
    assert events == [written.format(1), loaded.format(1)]
    trainer.write_weights([], 2, None)
    trainer.train(0, [], 1, 1.0, None)
    del events[:]
    trainer.update_weights([], 2, set(), None)
    assert events == [written.format(2), loaded.format(2)]


def test_other_transports_write_nothing(make_trainer):
    trainer, events = make_trainer(use_critic=False)
    trainer.write_weights([], 1, None)
    trainer.update_weights([], 1, set(), None)
    assert events == ["actor update_weights [] 1 set() None"]
