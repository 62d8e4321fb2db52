"""Flattened buckets and the restricted unpickler, in one process."""

from __future__ import annotations

import base64
import glob
import os
import pickle
import threading
from types import SimpleNamespace

import pytest
import torch

from slime.utils import tensor_wire
from slime.utils.tensor_wire import FLATTENED_BUCKET

PAIRS = [
    ("odd", torch.arange(5, dtype=torch.bfloat16)),
    ("matrix", torch.randn(3, 4)),
    ("strided", torch.arange(12.0).view(3, 4).t()),
    ("scalar", torch.tensor(2.5, dtype=torch.float64)),
    ("empty", torch.zeros(0, 7)),
    ("bytes", torch.arange(9, dtype=torch.uint8)),
]


def encode(value) -> str:
    return base64.b64encode(pickle.dumps(value)).decode()


def word(text: str) -> bytes:
    """Opcode that pushes a string."""
    return b"\x8c" + bytes([len(text)]) + text.encode()


def same(pairs, expected) -> bool:
    return len(pairs) == len(expected) and all(
        name == other and tensor.dtype == wanted.dtype and torch.equal(tensor, wanted)
        for (name, tensor), (other, wanted) in zip(pairs, expected, strict=True)
    )


def test_bucket_of_any_dtypes_and_shapes_comes_out_as_it_went_in():
    payload = tensor_wire.deserialize(tensor_wire.serialize(tensor_wire.flatten(PAIRS)))
    assert same(tensor_wire.named_tensors_of(payload, FLATTENED_BUCKET), PAIRS)


def test_plain_list_comes_out_as_it_went_in():
    text = tensor_wire.serialize([(name, tensor.clone()) for name, tensor in PAIRS])
    assert same(tensor_wire.named_tensors_of(tensor_wire.deserialize(text), None), PAIRS)


def test_parameters_and_empty_buckets_can_be_opened():
    text = tensor_wire.serialize([("p", torch.nn.Parameter(torch.ones(2)))])
    assert same(tensor_wire.named_tensors_of(tensor_wire.deserialize(text), None), [("p", torch.ones(2))])
    payload = tensor_wire.deserialize(tensor_wire.serialize(tensor_wire.flatten([])))
    assert tensor_wire.named_tensors_of(payload, FLATTENED_BUCKET) == []


def test_opened_tensors_are_views_of_the_senders_buffer():
    bucket = tensor_wire.flatten([("a", torch.zeros(4))])
    ((_, opened),) = tensor_wire.named_tensors_of(
        tensor_wire.deserialize(tensor_wire.serialize(bucket)), FLATTENED_BUCKET
    )
    bucket["flattened_tensor"].view(torch.float32).fill_(7)
    assert opened.tolist() == [7.0] * 4


def test_layout_aligns_tensors_and_says_its_size():
    bucket = tensor_wire.flatten(PAIRS)
    assert all(entry.start_idx % 16 == 0 for entry in bucket["metadata"])
    assert tensor_wire.flat_bytes(PAIRS) == bucket["flattened_tensor"].numel() == bucket["metadata"][-1].end_idx


@pytest.mark.skipif(not os.path.isdir("/dev/shm"), reason="shared memory is not a folder here")
def test_shared_memory_is_given_back_once_both_sides_drop_it():
    def segments() -> list[str]:
        return glob.glob(f"/dev/shm/torch_{os.getpid()}_*")

    before = segments()
    bucket = tensor_wire.flatten(PAIRS)
    opened = tensor_wire.deserialize(tensor_wire.serialize(bucket))
    assert len(segments()) == len(before) + 1
    del bucket, opened
    assert segments() == before


def test_sharing_strategy_of_the_process_is_left_alone():
    before = torch.multiprocessing.get_sharing_strategy()
    tensor_wire.serialize(tensor_wire.flatten(PAIRS))
    assert torch.multiprocessing.get_sharing_strategy() == before


class Meanwhile:
    """Does something while it is pickled."""

    def __init__(self, action):
        self.action = action

    def __reduce__(self):
        self.action()
        return dict, ()


def test_threads_that_serialize_at_the_same_time_do_not_change_each_others_strategy():
    """The second one begins within the first and ends after it."""
    before = torch.multiprocessing.get_sharing_strategy()
    second_is_in, first_is_out = threading.Event(), threading.Event()

    def within_the_second():
        second_is_in.set()
        first_is_out.wait(60)

    second = threading.Thread(target=tensor_wire.serialize, args=[Meanwhile(within_the_second)])

    def within_the_first():
        second.start()
        second_is_in.wait(0.1)  # it has to wait

    tensor_wire.serialize(Meanwhile(within_the_first))
    first_is_out.set()
    second.join(60)
    assert torch.multiprocessing.get_sharing_strategy() == before


class Global:
    """Pickles as a call of any function."""

    def __init__(self, function, *arguments):
        self.call = (function, arguments)

    def __reduce__(self):
        return self.call


@pytest.mark.parametrize(
    ("value", "named"),
    [
        (Global(os.system, "true"), "posix.system"),
        (Global(eval, "1"), "builtins.eval"),
        (Global(getattr, "a", "b"), "builtins.getattr"),
        ({"metadata": [Global(os.getcwd)]}, "posix.getcwd"),
        (Global(torch.load, "file"), "torch.serialization.load"),
        (Global(torch.hub.load, "repo"), "torch.hub.load"),
        (torch.nn.Linear, "torch.nn.modules.linear.Linear"),
        (SimpleNamespace(call=os.system), "posix.system"),
    ],
)
def test_everything_but_tensors_is_refused_by_name(value, named):
    with pytest.raises(ValueError, match=f"refused to unpickle {named}$"):
        tensor_wire.deserialize(encode(value))


def test_dotted_names_do_not_reach_into_admitted_classes():
    raw = b"\x80\x04" + word("torch") + word("UntypedStorage.from_file") + b"\x93."
    with pytest.raises(ValueError, match="refused to unpickle torch.UntypedStorage.from_file"):
        tensor_wire.deserialize(base64.b64encode(raw).decode())


def test_pickle_cannot_change_what_is_admitted():
    # BUILD with slot state: setattr(rebuild_tensor, "_function", 1)
    function = word("torch.multiprocessing.reductions") + word("rebuild_tensor") + b"\x93"
    raw = b"\x80\x04" + function + b"N}" + word("_function") + b"K\x01s\x86b."
    with pytest.raises(ValueError, match="refused to unpickle an assignment to _function"):
        tensor_wire.deserialize(base64.b64encode(raw).decode())
    assert same(
        tensor_wire.named_tensors_of(tensor_wire.deserialize(tensor_wire.serialize([("a", torch.ones(1))])), None),
        [("a", torch.ones(1))],
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"start_idx": -16}, "lies at bytes"),
        ({"end_idx": 10_000}, "lies at bytes"),
        ({"shape": torch.Size([4])}, "needs 16"),
        ({"shape": (-5,)}, "lies at bytes"),
        ({"dtype": "float32"}, "malformed"),
        ({"name": 5}, "malformed"),
        ({"start_idx": 0.0}, "malformed"),
    ],
)
def test_metadata_that_does_not_describe_the_bucket_is_refused(change, message):
    bucket = tensor_wire.flatten([("a", torch.ones(5))])
    vars(bucket["metadata"][0]).update(change)
    with pytest.raises(ValueError, match=message):
        tensor_wire.named_tensors_of(bucket, FLATTENED_BUCKET)


@pytest.mark.parametrize(
    ("payload", "load_format"),
    [
        ([("a", 1)], None),
        ([("a",)], None),
        ({"a": torch.ones(1)}, None),
        ([], FLATTENED_BUCKET),
        ({"flattened_tensor": [1], "metadata": []}, FLATTENED_BUCKET),
        ({"flattened_tensor": torch.ones(4), "metadata": [1]}, FLATTENED_BUCKET),
        ([("a", torch.ones(1)), ("a", torch.ones(1))], None),
        ([("a", torch.ones(1))], "direct"),
    ],
)
def test_payload_of_another_form_is_refused(payload, load_format):
    with pytest.raises(ValueError):
        tensor_wire.named_tensors_of(payload, load_format)


def test_unaligned_bucket_of_another_sender_is_read():
    flat = torch.cat([torch.ones(1, dtype=torch.uint8), torch.full((2,), 3.0).view(torch.uint8)])
    entry = SimpleNamespace(name="a", shape=torch.Size([2]), dtype=torch.float32, start_idx=1, end_idx=9, numel=8)
    ((_, tensor),) = tensor_wire.named_tensors_of({"flattened_tensor": flat, "metadata": [entry]}, FLATTENED_BUCKET)
    assert tensor.tolist() == [3.0, 3.0]
