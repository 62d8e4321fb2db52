"""Rounds of training of a mixture of experts: every expert learns, what was saved goes on, frozen parts stay."""

import os

import pytest
import torch

from slime.utils.tiny_model import Experts, make_tiny_model
from tests.unit.megatron.megatron_helpers import make_shard, train_args
from tests.unit.megatron.test_training import exported, start

TOGETHER = [[0, 1, 2, 3]]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    return make_tiny_model(folder, arch="qwen3_moe", init_std=0.1, experts=Experts(dense_layers=(0,)))


def changed(before, after) -> set[str]:
    return {name for name in before if not torch.equal(before[name], after[name])}


def test_router_and_every_expert_learn(model_dir):
    actor, _ = start(train_args(model_dir, lr=1e-2))
    before = exported(actor)
    report = actor.train(0, make_shard(None, micro_batches=TOGETHER))
    assert report["steps"][0]["train/grad_norm"] > 0
    assert changed(before, exported(actor)) == set(before)


def test_resumed_run_equals_uninterrupted_run(model_dir, tmp_path):
    directory = tmp_path / "iter_0000000"
    args, shard = train_args(model_dir, lr=1e-2), make_shard(None, micro_batches=TOGETHER)
    straight, _ = start(args)
    straight.train(0, shard)
    os.makedirs(directory)
    straight.save(str(directory))
    resumed, first = start(args, str(directory))
    assert first == 1
    for rollout_id in (1, 2):
        straight.train(rollout_id, shard)
        resumed.train(rollout_id, shard)
    assert changed(exported(straight), exported(resumed)) == set()


def test_recomputation_leaves_the_gradient_as_it_is(model_dir):
    shard = make_shard(None, micro_batches=[[0, 1], [2, 3]])
    plain, _ = start(train_args(model_dir))
    again, _ = start(
        train_args(model_dir, recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)
    )
    norms = [actor.train(0, shard)["steps"][0]["train/grad_norm"] for actor in (plain, again)]
    assert norms[0] == pytest.approx(norms[1], rel=1e-5)


def test_a_frozen_router_stays(model_dir):
    actor, _ = start(train_args(model_dir, lr=1e-2, freeze_params_name_list=["router"]))
    before = exported(actor)
    actor.train(0, make_shard(None, micro_batches=TOGETHER))
    after = exported(actor)
    assert set(before) - changed(before, after) == {"model.layers.1.mlp.gate.weight"}
