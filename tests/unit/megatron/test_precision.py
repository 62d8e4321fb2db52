"""16-bit training follows fp32 with fp32 master weights; memory savings (recompute, chunked log-probs) change no number."""

import pytest
import torch

from slime.utils.tiny_model import make_tiny_model
from tests.unit.megatron.megatron_helpers import make_shard, train_args

SGD = dict(optimizer="sgd", lr=1.0, clip_grad=0.0)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("model"), init_std=0.1)


def actor_for(model_dir, **flags):
    from slime.backends.megatron_utils.actor import MegatronActor

    actor = MegatronActor(train_args(model_dir, **flags), 0, 1, "127.0.0.1", 0)
    actor.init()
    return actor


def shard():
    return make_shard(None, micro_batches=[[0, 1], [2, 3]])


def step(model_dir, **flags):
    """One step: (gradient of every parameter, metrics)."""
    actor = actor_for(model_dir, **{**SGD, **flags})
    result = actor.train(0, shard())
    return {name: p.main_grad.float() for name, p in actor.model[0].named_parameters()}, result["steps"][0]


def master_parameters(actor) -> list[torch.Tensor]:
    from slime.backends.megatron_utils import optimizer_fixes

    return [
        p for part in optimizer_fixes.parts(actor.optimizer) for g in part.optimizer.param_groups for p in g["params"]
    ]


def test_bf16_step_is_the_fp32_step_to_bf16_accuracy(model_dir):
    """Angle and length of the gradient within what 8 bits of mantissa leave over two layers."""
    (full, expected), (half, got) = step(model_dir), step(model_dir, precision="bf16")
    a, b = (torch.cat([gradient.flatten() for gradient in gradients.values()]) for gradients in (full, half))
    assert torch.nn.functional.cosine_similarity(a, b, dim=0) > 0.995
    assert got["train/grad_norm"] == pytest.approx(expected["train/grad_norm"], rel=0.03)
    assert got["train/entropy_loss"] == pytest.approx(expected["train/entropy_loss"], rel=0.01)


def test_bf16_keeps_master_weights_and_gradients_in_fp32(model_dir):
    actor = actor_for(model_dir, precision="bf16")
    actor.train(0, shard())
    assert {p.dtype for p in actor.model[0].parameters()} == {torch.bfloat16}
    assert {p.dtype for p in master_parameters(actor)} == {torch.float32}
    assert {buffer.grad_data.dtype for buffer in actor.model[0].buffers} == {torch.float32}
    lean = actor_for(model_dir, precision="bf16", accumulate_allreduce_grads_in_fp32=False)
    assert {buffer.grad_data.dtype for buffer in lean.model[0].buffers} == {torch.bfloat16}


RECOMPUTE = {
    "whole_layers": dict(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1),
    "first_layer": dict(recompute_granularity="full", recompute_method="block", recompute_num_layers=1),
    "attention": dict(recompute_granularity="selective"),
    "feed_forward": dict(recompute_granularity="selective", recompute_modules=["mlp"]),
}


@pytest.mark.parametrize("flags", RECOMPUTE.values(), ids=RECOMPUTE.keys())
def test_recomputing_activations_changes_no_number(model_dir, flags, monkeypatch):
    from megatron.core.tensor_parallel import random as mcore_random

    recomputed = []
    backward = mcore_random.CheckpointFunction.backward
    monkeypatch.setattr(mcore_random.CheckpointFunction, "backward", lambda *a: recomputed.append(None) or backward(*a))
    plain, expected = step(model_dir)
    assert not recomputed
    again, got = step(model_dir, **flags)
    assert recomputed and got == expected
    assert all(torch.equal(plain[name], again[name]) for name in plain)


def test_log_probs_in_chunks_are_the_same(model_dir):
    flags = dict(entropy_coef=0.1)
    (plain, expected), (chunked, got) = step(model_dir, **flags), step(model_dir, log_probs_chunk_size=3, **flags)
    for name in plain:
        torch.testing.assert_close(plain[name], chunked[name], atol=1e-6, rtol=1e-5)
    assert got == pytest.approx(expected, abs=1e-6)
