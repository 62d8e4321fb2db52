"""Weight updates from tensors of another process of the machine: plain lists and flattened buckets, and what is refused."""

from __future__ import annotations

import base64
import os
import pickle

import pytest
import torch
from safetensors.torch import load_file

from slime.utils import tensor_wire
from slime.utils.checksum import tensor_checksum
from slime.utils.engine_client import EngineError
from slime.utils.sglang_checksum import sglang_checksums
from slime.utils.tensor_wire import FLATTENED_BUCKET

PROMPT = [10, 20, 30, 40]
pytestmark = pytest.mark.usefixtures("original_weights")


def weights_of(folder) -> dict[str, torch.Tensor]:
    return load_file(str(folder / "model.safetensors"))


def checksums_of(folder) -> dict[str, str]:
    return {name: tensor_checksum(tensor) for name, tensor in weights_of(folder).items()}


def held_by(api) -> dict[str, str]:
    """Checksums in the form that SGLang and the embedded engine both have."""
    return api.client.weights_checker("checksum")["ranks"][0]["checksums"]


@pytest.fixture
def update(api):
    """``update(payload, load_format)`` inside a begin/end pair."""

    def send(payload, load_format=None, version=None) -> None:
        api.client.begin_weight_update()
        try:
            text = payload if isinstance(payload, str) else tensor_wire.serialize(payload)
            api.client.update_weights_from_tensor([text], load_format, weight_version=version)
        finally:
            api.client.end_weight_update()

    return send


@pytest.mark.parametrize("load_format", [None, FLATTENED_BUCKET])
def test_update_serves_the_new_weights(api, update, other_model_dir, load_format):
    old = api.greedy(PROMPT)
    pairs = list(weights_of(other_model_dir).items())
    update(tensor_wire.flatten(pairs) if load_format else pairs, load_format, version="7")
    api.client.flush_cache(10)  # SGLang would go on from keys and values of the old weights
    new = api.greedy(PROMPT)
    assert new["output_ids"] != old["output_ids"]
    assert new["meta_info"]["weight_version"] == api.client.weight_version() == "7"
    api.client.update_weights_from_disk(str(other_model_dir))
    assert api.greedy(PROMPT)["output_ids"] == new["output_ids"]


def test_update_in_several_buckets_leaves_the_senders_bits(api, other_model_dir):
    pairs = list(weights_of(other_model_dir).items())
    api.client.begin_weight_update()
    for start in range(0, len(pairs), 3):
        bucket = tensor_wire.flatten(pairs[start : start + 3])
        api.client.update_weights_from_tensor([tensor_wire.serialize(bucket)], FLATTENED_BUCKET)
    api.client.end_weight_update()
    assert held_by(api) == sglang_checksums(weights_of(other_model_dir).items())


def test_bucket_of_mixed_dtypes_is_cast_to_the_engines(api, update, other_model_dir):
    pairs = list(weights_of(other_model_dir).items())
    mixed = [(name, tensor.half() if index % 2 else tensor) for index, (name, tensor) in enumerate(pairs)]
    update(tensor_wire.flatten(mixed), FLATTENED_BUCKET)
    assert held_by(api) == sglang_checksums((name, tensor.float()) for name, tensor in mixed)


def test_empty_bucket_changes_nothing(api, update, model_dir):
    update(tensor_wire.flatten([]), FLATTENED_BUCKET)
    assert held_by(api) == sglang_checksums(weights_of(model_dir).items())


def test_update_outside_begin_and_end_is_refused(api):
    text = tensor_wire.serialize([("model.norm.weight", torch.zeros(64))])
    with pytest.raises(EngineError, match="begin_weight_update") as caught:
        api.client.update_weights_from_tensor([text])
    assert caught.value.status == 400


class Harmful:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.system, (f"touch {self.path}",)


def refused_payloads(tmp_path) -> dict[str, tuple[str, str]]:
    def encode(value) -> str:
        return base64.b64encode(pickle.dumps(value)).decode()

    return {
        "code": (encode(Harmful(tmp_path / "harm")), "refused to unpickle posix.system"),
        "code in a pair": (encode([("model.norm.weight", Harmful(tmp_path / "harm"))]), "posix.system"),
        "foreign class": (encode([("model.norm.weight", os.path.join)]), "posixpath.join"),
        "descriptor": (encode([("x", _descriptor)]), "resource_sharer.DupFd"),
        "no base64": ("***", "cannot be opened"),
        "broken pickle": (base64.b64encode(b"\x80\x04broken").decode(), "cannot be opened"),
        "not tensors": (encode({"a": 1}), "list of \\(name, tensor\\) pairs"),
    }


class _Descriptor:
    def __reduce__(self):
        from multiprocessing.resource_sharer import DupFd

        return DupFd, (0,)


_descriptor = _Descriptor()


@pytest.mark.embedded_only
@pytest.mark.parametrize(
    "kind", ["code", "code in a pair", "foreign class", "descriptor", "no base64", "broken pickle", "not tensors"]
)
def test_refused_payload_is_a_400_that_says_why_and_changes_nothing(api, update, model_dir, tmp_path, kind):
    text, reason = refused_payloads(tmp_path)[kind]
    with pytest.raises(EngineError, match=reason) as caught:
        update(text, version="bad")
    assert caught.value.status == 400
    assert not (tmp_path / "harm").exists()
    assert api.client.weights_checker("checksum")["checksums"] == checksums_of(model_dir)
    assert api.client.weight_version() != "bad"


@pytest.mark.embedded_only
@pytest.mark.parametrize("fault", ["shape", "name", "bounds", "format"])
def test_bucket_that_does_not_fit_changes_nothing_and_the_next_one_works(
    api, update, model_dir, other_model_dir, fault
):
    weights = weights_of(other_model_dir)
    first = "model.embed_tokens.weight"
    second = {"shape": ("model.norm.weight", torch.zeros(3)), "name": ("model.nothing", torch.zeros(64))}
    pairs = [(first, weights[first]), second.get(fault, ("model.norm.weight", torch.zeros(64)))]
    payload = tensor_wire.flatten(pairs)
    if fault == "bounds":
        payload["metadata"][1].end_idx += 4
    with pytest.raises(EngineError) as caught:
        update(payload, "unknown" if fault == "format" else FLATTENED_BUCKET, version="bad")
    assert caught.value.status == 400
    assert api.client.weights_checker("checksum")["checksums"] == checksums_of(model_dir)
    update(tensor_wire.flatten(list(weights.items())), FLATTENED_BUCKET, version="good")
    assert api.client.weights_checker("checksum")["checksums"] == checksums_of(other_model_dir)


@pytest.mark.embedded_only
def test_one_payload_per_rank_is_demanded(api, update):
    text = tensor_wire.serialize([("model.norm.weight", torch.zeros(64))])
    api.client.begin_weight_update()
    for payloads in ([], [text, text], [None]):
        response = api.post("/update_weights_from_tensor", {"serialized_named_tensors": payloads})
        assert response.status_code == 400
    assert api.post("/update_weights_from_tensor", {"serialized_named_tensors": "text"}).status_code == 400


def test_fb_a23_requests_in_flight_live_through_an_update_and_carry_both_versions(api, update, other_model_dir):
    before, bucket = api.client.weight_version(), tensor_wire.flatten(list(weights_of(other_model_dir).items()))
    answers = api.interrupted(lambda: update(bucket, FLATTENED_BUCKET, version="new"), [[i + 1] for i in range(8)])
    for meta in (answer["meta_info"] for answer in answers):
        assert meta["finish_reason"]["type"] == "length"
        assert [span["version"] for span in meta["weight_versions"]] == [before, "new"]
