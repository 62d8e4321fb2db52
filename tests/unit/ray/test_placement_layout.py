"""The layout table: how many slots a run reserves and where the engines' share begins."""

from types import SimpleNamespace

import pytest

from slime.ray.placement_group import layout


def make_args(**changes):
    args = {
        "actor_num_nodes": 2,
        "actor_num_gpus_per_node": 8,
        "rollout_num_gpus": 32,
        "debug_train_only": False,
        "debug_rollout_only": False,
        "rollout_external": False,
        "colocate": False,
        "num_critic_slots": 0,
    }
    return SimpleNamespace(**(args | changes))


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, (48, 16)),
        ({"debug_train_only": True}, (16, 0)),
        ({"debug_rollout_only": True}, (32, 0)),
        ({"colocate": True, "rollout_num_gpus": 8}, (16, 0)),
        ({"colocate": True, "rollout_num_gpus": 16}, (16, 0)),
        ({"colocate": True, "rollout_num_gpus": 32}, (32, 0)),
        ({"rollout_num_gpus": 0}, (16, 16)),
        ({"colocate": True, "rollout_num_gpus": 0}, (16, 0)),
        ({"rollout_external": True}, (16, 16)),
        ({"rollout_external": True, "debug_rollout_only": True}, (16, 0)),
        ({"num_critic_slots": 16}, (64, 16)),
        ({"num_critic_slots": 16, "colocate": True, "rollout_num_gpus": 16}, (32, 0)),
        ({"num_critic_slots": 16, "debug_train_only": True}, (32, 0)),
    ],
)
def test_layout_of_every_mode(changes, expected):
    assert layout(make_args(**changes)) == expected
