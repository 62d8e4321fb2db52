"""A shard survives its way between processes unchanged, and cheap."""

import pickle

import torch

from slime.batching.transport import PackedColumn, pack, unpack


def make_shard():
    return {
        "tokens": [torch.tensor([1, 2, 3]), torch.tensor([], dtype=torch.int64), torch.tensor([4])],
        "rollout_log_probs": [torch.tensor([-0.5]), torch.tensor([-1.0, -2.0]), torch.tensor([])],
        "rollout_mask_sums": torch.tensor([1.0, 2.0]),
        "rewards": [0.5, -0.5, 0.0],
        "experts": [torch.ones(2, 3, 2, dtype=torch.int16), torch.zeros(0, 3, 2, dtype=torch.int16)],
        "images": [torch.zeros(2, 2), torch.zeros(1, 3)],
        "mixed": [torch.tensor([1]), None, torch.tensor([2])],
        "empty": [],
    }


def test_shard_is_the_same_after_packing_pickling_and_unpacking():
    shard = make_shard()
    received = unpack(pickle.loads(pickle.dumps(pack(shard))))
    assert received.keys() == shard.keys()
    for name in ("tokens", "rollout_log_probs", "images", "experts"):
        assert [row.dtype for row in received[name]] == [row.dtype for row in shard[name]]
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(received[name], shard[name], strict=True))
    assert received["rewards"] == shard["rewards"] and received["empty"] == []
    assert received["mixed"][1] is None and torch.equal(received["rollout_mask_sums"], shard["rollout_mask_sums"])


def test_only_columns_of_one_dtype_that_differ_in_length_are_packed():
    packed = pack(make_shard())
    assert {name for name, value in packed.items() if isinstance(value, PackedColumn)} == {
        "tokens",
        "rollout_log_probs",
        "experts",
    }


def test_received_rows_may_be_written_to():
    packed = pack(make_shard())
    packed["tokens"].values.setflags(write=False)
    rows = unpack(packed)["tokens"]
    rows[0][0] = 9
    assert packed["tokens"].values[0] == 1


def test_media_of_samples_reach_the_shard_of_their_rank():
    from types import SimpleNamespace

    import numpy

    from slime.batching.schedule import split_train_data_by_dp

    read_only = numpy.arange(3, dtype=numpy.float32)
    read_only.flags.writeable = False
    media = [
        {"pixel_values": torch.full((2, 3), 1.0), "grid": numpy.array([[1, 2]]), "names": ["a"]},
        None,
        {"pixel_values": read_only},
        {"pixel_values": torch.zeros(0, 3)},
    ]
    data = {
        "tokens": [[1, 2]] * 4,
        "response_lengths": [1] * 4,
        "rollout_ids": [0, 1, 2, 3],
        "loss_masks": [[1]] * 4,
        "multimodal_train_inputs": media,
    }
    args = SimpleNamespace(
        global_batch_size=4, micro_batch_size=1, use_dynamic_batch_size=False, max_tokens_per_gpu=None,
        balance_data=False, balance_by_flops=False,
    )  # fmt: skip
    shards = [unpack(pack(shard)) for shard in split_train_data_by_dp(args, data, 2)]
    for shard in shards:
        for position, value in zip(shard["partition"], shard["multimodal_train_inputs"], strict=True):
            wanted = media[position]
            assert (value is None) == (wanted is None)
            for name, item in (wanted or {}).items():
                got = value[name]
                assert (
                    got == item
                    if name == "names"
                    else torch.equal(got, torch.as_tensor(item.copy() if isinstance(item, numpy.ndarray) else item))
                )
