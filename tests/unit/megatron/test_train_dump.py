"""The train dump joins the rollout dump: every sample once, at its position, with what training added."""

import torch

from slime.utils.tiny_model import make_tiny_model
from tests.unit.megatron.megatron_helpers import make_shard, train_args


def test_dump_holds_every_sample_at_its_position_with_the_trained_columns(tmp_path):
    from slime.backends.megatron_utils.actor import MegatronActor

    folder = make_tiny_model(tmp_path / "model", init_std=0.1)
    template = str(tmp_path / "train_data" / "{rollout_id}_{rank}.pt")
    actor = MegatronActor(train_args(folder, save_debug_train_data=template), 0, 1, "127.0.0.1", 0)
    actor.init()
    shard = make_shard(None, micro_batches=[[0, 1], [2, 3]], partition=[2, 0, 3, 1])
    actor.train(5, shard)
    dump = torch.load(tmp_path / "train_data" / "5_0.pt", weights_only=True)
    assert (dump["format_version"], dump["rollout_id"], dump["rank"]) == (2, 5, 0)
    assert [s["rollout_position"] for s in dump["samples"]] == [0, 1, 2, 3]
    assert [s["sample_index"] for s in dump["samples"]] == [101, 103, 100, 102]
    for sample in dump["samples"]:
        length = sample["response_lengths"]
        assert len(sample["advantages"]) == len(sample["log_probs"]) == len(sample["loss_masks"]) == length
        assert torch.isfinite(sample["log_probs"]).all()
    assert dump["raw_reward"] == shard["raw_reward"]
    assert dump["dp_shards"][0]["partition"] == [2, 0, 3, 1]
    assert [p.name for p in (tmp_path / "train_data").iterdir()] == ["5_0.pt"]
