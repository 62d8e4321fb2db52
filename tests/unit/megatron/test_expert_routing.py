"""Replay of experts: trainer and engine agree although their routers do not, with packing, recompute and several steps."""

import os

import pytest
import torch
from safetensors.torch import load_file, save_file

from slime.utils.tiny_model import Experts, make_tiny_model
from tests.unit.megatron.megatron_helpers import make_shard, train_args
from tests.unit.megatron.test_training import exported, start

LENGTHS, RESPONSES = (9, 12, 7, 15), (4, 6, 3, 8)
CUT = [[0, 1, 2], [3]]
FULL = dict(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)


def undecided_model(path, seed: int):
    """A model whose routers score all experts alike up to noise of 1e-6: which ones are chosen is the noise's doing."""
    folder = make_tiny_model(
        path, arch="qwen3_moe", init_std=0.2, experts=Experts(count=6, dense_layers=(0,)), layers=3
    )
    tensors = load_file(folder / "model.safetensors")
    noise = torch.Generator().manual_seed(seed)
    for name, tensor in tensors.items():
        if name.endswith("mlp.gate.weight"):
            tensors[name] = tensor[:1] + 1e-6 * torch.randn(tensor.shape, generator=noise)
    save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    return undecided_model(tmp_path_factory.mktemp("trainer"), seed=1)


@pytest.fixture(scope="module")
def rollout(tmp_path_factory):
    """Columns of what the engine computed with other noise in its routers."""
    from slime.engine.kv_cache import KVCache
    from slime.engine.model import Model
    from slime.engine.model_config import load_model_config
    from slime.engine.weights import Weights

    folder, cpu = undecided_model(tmp_path_factory.mktemp("engine"), seed=2), torch.device("cpu")
    config = load_model_config(folder)
    weights = Weights(config, torch.float32, cpu)
    weights.load(folder)
    model = Model(config, weights, KVCache(config, torch.float32, cpu, 1 << 26, 8, keeps_experts=True), 64)
    columns = {"rollout_log_probs": [], "rollout_routed_experts": []}
    for tokens, response in zip(make_shard(None, LENGTHS, RESPONSES)["tokens"], RESPONSES, strict=True):
        with torch.inference_mode():
            model.cache.reserve(1, len(tokens), 0)
            scores = model.logits(model.prefill(tokens[None], 0)[0]).log_softmax(-1)
        chosen = scores[:-1].gather(1, tokens[1:, None])[:, 0]
        columns["rollout_log_probs"].append(chosen[-response:].clone())
        columns["rollout_routed_experts"].append(model.cache.experts[0, : len(tokens) - 1].clone())
    return columns


def shard_of(rollout, **options):
    return make_shard(None, LENGTHS, RESPONSES, **{"micro_batches": CUT, **options}, **rollout)


def gap(report, step=0) -> float:
    return report["steps"][step]["train/train_rollout_logprob_abs_diff"]


def test_without_replay_undecided_routers_disagree(model_dir, rollout):
    actor, _ = start(train_args(model_dir))
    assert gap(actor.train(0, shard_of(rollout))) > 0.05


@pytest.mark.parametrize("flags", [{}, FULL], ids=["plain", "recomputed"])
def test_with_the_engine_s_experts_log_probs_agree(model_dir, rollout, flags):
    actor, _ = start(train_args(model_dir, use_routing_replay=True, use_rollout_routing_replay=True, **flags))
    report = actor.train(0, shard_of(rollout))
    metrics = report["steps"][0]
    assert gap(report) < 1e-5
    total = sum(LENGTHS)
    assert metrics["train/moe_replayed"] == pytest.approx((total - len(LENGTHS)) / total)  # no record of last tokens
    assert metrics["train/moe_replay_differs"] > 0.2
    assert 1 <= metrics["train/moe_max_load"] <= 3 and 0 <= metrics["train/moe_idle_experts"] < 1


def test_old_log_probs_are_computed_with_the_engine_s_experts_too(model_dir, rollout):
    args = train_args(model_dir, use_routing_replay=True, use_rollout_routing_replay=True, global_batch_size=2)
    report = start(args)[0].train(0, shard_of(rollout, micro_batches=[[0, 1], [2, 3]], num_steps=2))
    assert "perf/log_probs_time" in report["rollout"]
    assert gap(report, 0) < 1e-5 and gap(report, 1) < 1e-5
    assert abs(report["steps"][0]["train/ppo_kl"]) < 1e-6


def test_recomputation_takes_the_replayed_experts(model_dir, rollout):
    replay = dict(use_routing_replay=True, use_rollout_routing_replay=True)
    norms = []
    for flags in ({}, FULL, dict(recompute_granularity="selective", recompute_modules=["moe"])):
        report = start(train_args(model_dir, **replay, **flags))[0].train(0, shard_of(rollout))
        norms.append(report["steps"][0]["train/grad_norm"])
    assert norms == pytest.approx([norms[0]] * 3, rel=1e-5)


def nudge_routers(args, rollout_id, step_id, model, optimizer, scheduler) -> None:
    """Hook before a step: other noise in the routers."""
    for name, parameter in model[0].named_parameters():
        if "router" in name:
            parameter.data += 1e-6 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(5))


@pytest.mark.parametrize("replays", [True, False])
def test_training_takes_the_experts_of_the_old_log_probs(model_dir, replays):
    hook = "tests.unit.megatron.test_expert_routing.nudge_routers"
    args = train_args(
        model_dir, use_routing_replay=replays, global_batch_size=2, custom_megatron_before_train_step_hook_path=hook,
        use_dynamic_batch_size=True, max_tokens_per_gpu=100, log_probs_max_tokens_per_gpu=100,
    )  # fmt: skip
    report = start(args)[0].train(0, make_shard(None, micro_batches=[[0, 1], [2, 3]], num_steps=2))
    moved = abs(report["steps"][0]["train/ppo_kl"])
    assert moved < 5e-5 if replays else moved > 1e-3


def test_records_are_cut_for_the_tokens_of_a_rank_and_padding_is_spread():
    from slime.backends.megatron_utils.expert_routing import _EngineExperts

    class Args:
        num_experts = 4

    rows = [torch.full((2, 1, 2), 3, dtype=torch.int16), torch.zeros(1, 1, 2, dtype=torch.int16)]
    experts = _EngineExperts(rows, (3, 2), torch.tensor([0, 1, 2, 3, 4, -1, -1]), Args)
    # The last token of a sample, and one for which only zeros came, choose for themselves.
    assert experts.get(0).tolist() == [[3, 3], [3, 3], [-1, -1], [-1, -1], [-1, -1], [2, 3], [0, 1]]


def test_missing_records_are_named(model_dir):
    actor, _ = start(train_args(model_dir, use_routing_replay=True, use_rollout_routing_replay=True))
    with pytest.raises(ValueError, match="has no rollout_routed_experts"):
        actor.train(0, make_shard(None, micro_batches=CUT))


# ---- balance -------------------------------------------------------------------------------------------------------


def test_balancing_losses_are_reported_and_move_the_router(model_dir):
    shard, gates = make_shard(None, micro_batches=CUT), []
    for flags in ({}, dict(moe_aux_loss_coeff=1.0, moe_z_loss_coeff=0.1)):
        actor, _ = start(train_args(model_dir, lr=1e-2, moe_per_layer_logging=True, **flags))
        metrics = actor.train(0, shard)["steps"][0]
        gates.append(exported(actor)["model.layers.1.mlp.gate.weight"])
    assert metrics["train/load_balancing_loss"] >= 0.9 and metrics["train/z_loss"] > 0
    assert metrics["train/moe_max_load"] == pytest.approx(
        (metrics["train/moe_max_load_layer_1"] + metrics["train/moe_max_load_layer_2"]) / 2
    )
    assert not torch.equal(*gates)


@pytest.fixture
def biased(tmp_path):
    """Arguments of a model whose routers score with a sigmoid and a balancing bias."""
    from slime.backends.megatron_utils.architecture import architecture_args

    folder = make_tiny_model(tmp_path / "model", arch="qwen3_moe", init_std=0.2)
    tensors = load_file(folder / "model.safetensors")
    tensors.update({f"model.layers.{i}.mlp.gate.e_score_correction_bias": torch.arange(4.0) / 100 for i in range(2)})
    save_file(tensors, folder / "model.safetensors")
    args = train_args(folder, moe_router_bias_update_rate=0.01)
    for name, value in architecture_args(args.model_arch).items():
        setattr(args, name, value)
    args.moe_router_score_function, args.moe_router_enable_expert_bias = "sigmoid", True
    return args


def bias_of(actor) -> torch.Tensor:
    return exported(actor)["model.layers.1.mlp.gate.e_score_correction_bias"]


def test_balancing_bias_is_loaded_moved_each_step_exported_and_saved(biased, tmp_path):
    shard, directory = make_shard(None, micro_batches=CUT), tmp_path / "iter_0000000"
    actor, _ = start(biased)
    before = bias_of(actor)
    assert torch.equal(before, torch.arange(4.0) / 100)
    actor.train(0, shard)
    moved = (bias_of(actor) - before).abs()
    assert ((moved - 0.01).abs() < 1e-6).logical_or(moved == 0).all() and moved.any()
    os.makedirs(directory)
    actor.save(str(directory))
    resumed, _ = start(biased, str(directory))
    assert torch.equal(bias_of(resumed), bias_of(actor))
    actor.train(1, shard)
    resumed.train(1, shard)
    assert torch.equal(bias_of(resumed), bias_of(actor))


def test_skipped_step_leaves_the_balancing_bias_alone(biased):
    actor, _ = start(biased)
    before = bias_of(actor)
    report = actor.train(0, make_shard(None, micro_batches=CUT, rewards=[float("nan")] * 4))
    assert report["steps"][0]["train/step_skipped"] == 1 and torch.equal(bias_of(actor), before)


def test_reference_keeps_its_own_bias(biased):
    biased.use_kl_loss, biased.kl_loss_coef = True, 0.1
    actor, _ = start(biased)
    actor.train(0, make_shard(None, micro_batches=CUT))
    after = bias_of(actor)
    actor.backup.switch("ref")
    reference = dict(actor.model[0].named_buffers())["module.decoder.layers.1.mlp.router.expert_bias"].clone()
    actor.backup.switch("actor")
    assert torch.equal(reference, torch.arange(4.0) / 100)
    assert torch.equal(bias_of(actor), after) and not torch.equal(after, reference)
