"""A rank that sends weights walks its export to the end whatever happens: other ranks take part in it."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace

import pytest

from slime.ray.train_actor import TrainActor


class Exporting:
    """Stands in for the Megatron actor: an export of three tensors, of which other ranks hold parts."""

    def __init__(self):
        self.walked = 0

    def export_weights(self):
        for i in range(3):
            self.walked += 1
            yield f"w{i}", None

    export_base = export_weights

    def weights_in_place(self):
        return nullcontext()

    def remember(self, version, in_use):
        """Nothing is kept."""

    def export_adapters(self):
        return {}

    def adapter_config(self):
        return {}


class Publisher:
    clients = ["an engine"]

    def update(self, tensors, version, finish=None):
        next(tensors)
        raise RuntimeError("the engine refused")


@pytest.mark.parametrize("lora_sync", ["merged", "adapter"])
def test_a_failing_update_leaves_no_rank_waiting_in_the_export(lora_sync):
    args = SimpleNamespace(
        lora_sync=lora_sync, lora_base="start", hf_checkpoint="model", rollout_num_gpus_per_engine=1, run_dir="run"
    )
    rank = TrainActor(args, 0, 2, "127.0.0.1")
    rank._actor, rank._publisher = Exporting(), Publisher()
    with pytest.raises(RuntimeError, match="the engine refused"):
        rank.update_weights(["an engine"], 1, set())
    assert rank._actor.walked == 3


def test_nor_does_a_failing_comparison():
    class Engine:
        def weights_checker(self, action):
            raise RuntimeError("the engine refused")

    rank = TrainActor(SimpleNamespace(lora_sync="merged", lora_base=None, hf_checkpoint=None), 0, 2, "127.0.0.1")
    rank._actor, rank._publisher = Exporting(), SimpleNamespace(clients=[Engine()])
    with pytest.raises(RuntimeError, match="the engine refused"):
        rank.check_weights(1)
    assert rank._actor.walked == 3
