"""A sleeping rank holds no gradients, exports its weights, and trains on as if it had stayed awake."""

from __future__ import annotations

import gc

import pytest
import torch

from slime.backends.megatron_utils.actor import MegatronActor
from slime.backends.megatron_utils.offload import ParkedStorages, on_accelerator
from slime.utils.platform import process_tree_memory_bytes
from slime.utils.tiny_model import make_tiny_model
from tests.unit.megatron.megatron_helpers import make_shard, train_args

MIB = 2**20


def start(folder, **overrides) -> MegatronActor:
    actor = MegatronActor(train_args(folder, **overrides), 0, 1, "127.0.0.1", 0)
    actor.init()
    return actor


def exported(actor) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in actor.export_weights()}


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_training_with_naps_is_training_without(tmp_path, precision):
    make_tiny_model(tmp_path / "model", init_std=0.1)
    awake, napping = (start(tmp_path / "model", precision=precision) for _ in range(2))
    shard = make_shard(None, micro_batches=[[0, 1], [2, 3]])
    napping.sleep()  # as at the start of a run: before the first step there is no optimizer state
    for rollout_id in range(3):
        napping.wake()
        results = [actor.train(rollout_id, shard)["steps"][rollout_id] for actor in (awake, napping)]
        assert results[0] == results[1]
        napping.sleep()
        napping.sleep()
        with napping.weights_in_place():
            held = exported(napping)
        for name, tensor in exported(awake).items():
            assert torch.equal(held[name], tensor), name
    napping.wake()
    napping.wake()
    assert not napping.offload.is_asleep


def test_gradients_of_a_sleeping_rank_are_freed(tmp_path):
    """Measured on about 20 million parameters, 80 MB of fp32 gradients."""
    shape = {"hidden": 512, "layers": 6, "heads": 8, "kv_heads": 8, "head_dim": 64, "ffn": 1536}
    actor = start(make_tiny_model(tmp_path / "model", **shape))
    actor.train(0, make_shard(None, micro_batches=[[0, 1, 2, 3]]))
    gc.collect()
    grads = actor.offload.grad_bytes()
    assert grads > 70 * MIB
    before = process_tree_memory_bytes()
    actor.sleep()
    asleep = process_tree_memory_bytes()
    assert actor.offload.grad_bytes() == 0
    assert before - asleep > 0.9 * grads, (before / MIB, asleep / MIB, grads / MIB)
    actor.wake()
    assert actor.offload.grad_bytes() == grads
    assert all(not bool(buffer.grad_data.any()) for buffer in actor.model[0].buffers)


def test_work_on_a_sleeping_rank_is_a_bug(tmp_path):
    make_tiny_model(tmp_path / "model")
    actor = start(tmp_path / "model")
    actor.sleep()
    with pytest.raises(AssertionError, match="sleeping"):
        actor.train(0, make_shard(None))
    with pytest.raises(AssertionError, match="sleeping"):
        actor.save(str(tmp_path))


def test_parked_storages_are_empty_and_come_back_behind_every_view():
    base = torch.arange(12.0)
    view, other = base.view(3, 4)[1:], torch.tensor([True, False])
    parked = ParkedStorages()
    parked.park([base, view, other])
    assert base.untyped_storage().nbytes() == other.untyped_storage().nbytes() == 0
    parked.unpark()
    assert base.tolist() == [float(i) for i in range(12)]
    assert view.tolist() == [[4.0, 5.0, 6.0, 7.0], [8.0, 9.0, 10.0, 11.0]]
    assert other.tolist() == [True, False]
    parked.unpark()
    assert base.tolist() == [float(i) for i in range(12)]


def test_what_is_in_host_memory_already_stays():
    assert list(on_accelerator([torch.ones(1), torch.ones(1, device="meta")]))[0].device.type == "meta"
