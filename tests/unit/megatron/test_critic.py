"""The critic: a value head on the actor's weights, its passes and losses, its checkpoint, and what it gives the actor."""

import os

import pytest
import torch

from slime.utils.tiny_model import make_tiny_model
from tests.unit.megatron.megatron_helpers import make_shard, train_args

PPO = dict(advantage_estimator="ppo", use_critic=True, gamma=0.9, lambd=0.8)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("model"), init_std=0.1)


def start(args, role="critic", load_dir=None):
    from slime.backends.megatron_utils.actor import MegatronActor

    actor = MegatronActor(args, 0, 1, "127.0.0.1", 0, role=role)
    return actor, actor.init(load_dir)


def weights(actor) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in actor.model[0].module.named_parameters()}


def hf_hidden_states(model_dir, tokens):
    from transformers import AutoModel

    model = AutoModel.from_pretrained(model_dir)
    return [model(ids[None]).last_hidden_state[0] for ids in tokens]


def test_values_are_the_head_over_the_actors_hidden_states(model_dir):
    """Read one position before each response token, whatever the temperature (FB-L17) and the micro-batches."""
    shard = make_shard(None, micro_batches=[[2, 0], [3, 1]])
    critic, first = start(train_args(model_dir, **PPO, rollout_temperature=0.5))
    assert first == 0
    got = critic.score(0, shard)
    head = critic.model[0].module.output_layer
    assert got["passes"] == ["critic"] and set(got) == {"passes", "values"}
    hidden = hf_hidden_states(model_dir, shard["tokens"])
    for row, states, length in zip(got["values"], hidden, shard["response_lengths"], strict=True):
        expected = (states @ head.weight[0] + head.bias)[-length - 1 : -1]
        torch.testing.assert_close(row, expected.detach(), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("tied", [True, False])
def test_every_start_draws_the_same_small_head(tmp_path, tied):
    folder = make_tiny_model(tmp_path / "model", init_std=0.1, tied=tied)
    first, second = (weights(start(train_args(folder, **PPO))[0]) for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert first["output_layer.weight"].shape[0] == 1 and float(first["output_layer.bias"]) == 0
    assert 0.005 < float(first["output_layer.weight"].std()) < 0.05


def test_values_learn_the_return(model_dir):
    critic, _ = start(train_args(model_dir, **PPO, lr=1e-2, value_clip=10.0, num_rollout=40))
    shard = make_shard(None, micro_batches=[[0, 1], [2, 3]])
    losses = []
    for i in range(20):
        report = critic.train(i, shard)
        losses.append(report["steps"][i]["train/critic-value_loss"])
    assert losses[-1] < 0.3 * losses[0]
    assert {"train/critic-value_clipfrac", "train/critic-grad_norm", "train/critic-lr-pg_0"} <= report["steps"][
        19
    ].keys()
    assert {"perf/critic_train_time", "perf/critic_values_time", "perf/critic_train_tok_per_s"} <= report[
        "rollout"
    ].keys()
    assert not any(name.startswith("perf/") and "critic" not in name for name in report["rollout"])
    assert {"rollout/values", "rollout/returns"} <= report["rollout"].keys()


def test_gradient_of_the_value_loss_does_not_depend_on_micro_batches(model_dir):
    moved = []
    for cut in ([[0], [1], [2], [3]], [[3, 0, 2, 1]]):
        flags = dict(optimizer="sgd", sgd_momentum=0.0, clip_grad=0.0, lr=1.0)
        critic, _ = start(train_args(model_dir, **PPO, **flags))
        before = weights(critic)
        masks = [torch.tensor([1, 0, 1, 1]), torch.ones(6), torch.zeros(3), torch.ones(8)]
        critic.train(0, make_shard(None, micro_batches=cut, loss_masks=[m.int() for m in masks]))
        moved.append({name: before[name] - now for name, now in weights(critic).items()})
    assert float(moved[0]["output_layer.bias"].abs()) > 1e-3
    for name, expected in moved[0].items():
        torch.testing.assert_close(moved[1][name], expected, atol=2e-6, rtol=1e-4, msg=name)


def test_actor_trains_on_the_advantages_of_the_critics_values(model_dir):
    shard = make_shard(None, micro_batches=[[0, 1], [2, 3]])
    critic, _ = start(train_args(model_dir, **PPO))
    critic.train(0, shard)
    actor, _ = start(train_args(model_dir, **PPO, lr=1e-3), role="actor")
    with pytest.raises(ValueError, match="critic values"):
        actor.train(0, shard)
    report = actor.train(0, shard, [critic.columns])
    from slime.algorithms.advantages import AdvantageInputs, compute

    inputs = AdvantageInputs(
        shard["rewards"], shard["response_lengths"], shard["loss_masks"], None, critic.columns["values"], 0.0, 0.9, 0.8
    )
    advantages, returns = compute("ppo", inputs)
    for name, rows in (("advantages", advantages), ("returns", returns), ("values", critic.columns["values"])):
        expected = sum(float(row.mean()) for row in rows) / 4
        assert report["rollout"][f"rollout/{name}"] == pytest.approx(expected, abs=1e-5), name
    assert abs(report["steps"][0]["train/pg_loss"]) > 1e-4


def test_critic_learns_the_returns_that_the_actor_is_trained_with_also_with_a_kl_penalty(model_dir, tmp_path):
    other = make_tiny_model(tmp_path / "ref", init_std=0.1, seed=7)
    flags = dict(**PPO, kl_coef=0.5, ref_load=str(other), load=str(model_dir))
    shard = make_shard(None, micro_batches=[[0, 1], [2, 3]])
    actor, _ = start(train_args(model_dir, **flags), role="actor")
    scored = actor.score(0, shard)
    assert scored["passes"] == ["ref", "actor"]
    critic, _ = start(train_args(model_dir, **flags))
    assert critic.backup.tags() == set()
    own = critic.train(0, shard, [scored])
    calls = []
    actor.passes._log_probs = lambda *a: calls.append(a)
    report = actor.train(0, shard, [scored, critic.columns])
    assert not calls  # the passes are not run again
    assert abs(report["rollout"]["rollout/kl"]) > 1e-2
    assert own["rollout"]["rollout/returns"] == report["rollout"]["rollout/returns"]
    without = start(train_args(model_dir, **{**flags, "kl_coef": 0.0}))[0].train(0, shard)
    assert abs(without["rollout"]["rollout/returns"] - own["rollout"]["rollout/returns"]) > 1e-2


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_resumed_critic_equals_the_one_that_went_on(model_dir, tmp_path, precision):
    flags = dict(PPO, lr=1e-2, lr_decay_style="cosine", precision=precision, load=str(model_dir))
    shards = [make_shard(None, micro_batches=[[0, 1], [2, 3]], seed=i) for i in range(4)]
    critic, _ = start(train_args(model_dir, **flags))
    for i in range(2):
        critic.train(i, shards[i])
    directory = tmp_path / "iter_0000001"
    os.makedirs(directory)
    critic.save(str(directory))
    assert (directory / "critic" / "metadata.json").is_file() and not (directory / "metadata.json").exists()
    straight = [critic.train(i, shards[i])["steps"][i] for i in (2, 3)]
    resumed, first = start(train_args(model_dir, **flags), load_dir=str(directory))
    assert first == 2
    assert [resumed.train(i, shards[i])["steps"][i] for i in (2, 3)] == straight
    assert all(torch.equal(a, b) for a, b in zip(weights(critic).values(), weights(resumed).values(), strict=True))


def test_critic_starts_from_an_actors_checkpoint_with_a_fresh_head_and_from_a_critics_with_its_own(model_dir, tmp_path):
    directory = tmp_path / "iter_0000000"
    os.makedirs(directory)
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("0")
    actor, _ = start(train_args(model_dir, lr=1e-2), role="actor")
    actor.train(0, make_shard(None))
    actor.save(str(directory))
    fresh, _ = start(train_args(model_dir, **PPO, lr=1e-2, load=str(tmp_path)))
    drawn = weights(start(train_args(model_dir, **PPO))[0])
    trained, got = weights(actor), weights(fresh)
    for name, tensor in got.items():
        expected = drawn[name] if name.startswith("output_layer") else trained[name]
        assert torch.equal(tensor, expected), name
    fresh.train(0, make_shard(None))
    fresh.save(str(directory))
    for path in (tmp_path, directory / "critic"):
        again, first = start(train_args(model_dir, **PPO, load=str(path)))
        assert first == 0
        assert all(torch.equal(a, b) for a, b in zip(weights(again).values(), weights(fresh).values(), strict=True))
