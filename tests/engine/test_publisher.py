"""The trainer's side of a weight update against a real engine: what a failed one leaves behind."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from slime.backends.weight_sync.disk import VersionFolder
from slime.backends.weight_sync.distributed import BroadcastTransport
from slime.backends.weight_sync.publisher import WeightPublisher
from slime.backends.weight_sync.tensor import TensorTransport
from slime.utils.engine_client import EngineError
from slime.utils.sglang_checksum import sglang_checksums

PROMPT = [10, 20, 30, 40]
TIMEOUT_S = 20.0
pytestmark = pytest.mark.usefixtures("original_weights")


@pytest.fixture
def broadcast(api) -> BroadcastTransport:
    return BroadcastTransport([api.client], backend="gloo", host="127.0.0.1", timeout_s=TIMEOUT_S)


def held_by(api) -> dict[str, str]:
    return api.client.weights_checker("checksum")["ranks"][0]["checksums"]


def test_fb_a24_next_update_works_after_one_whose_broadcast_raised(api, broadcast, other_model_dir, monkeypatch):
    weights = load_file(str(other_model_dir / "model.safetensors"))
    publisher = WeightPublisher([broadcast], buffer_bytes=1 << 16, timeout_s=TIMEOUT_S)
    really_broadcast, calls = dist.broadcast, []

    def fails_once(*args, **kwargs):
        calls.append(args)
        if len(calls) == 3:
            raise RuntimeError("the network is gone")
        return really_broadcast(*args, **kwargs)

    monkeypatch.setattr(dist, "broadcast", fails_once)
    started = time.monotonic()
    with pytest.raises(RuntimeError, match="update to version 1 failed.*the network is gone. Look at"):
        publisher.update(weights.items(), "1")
    assert time.monotonic() - started < TIMEOUT_S
    assert len(api.greedy(PROMPT)["output_ids"]) == 8  # it goes on, whatever it holds
    publisher.update(weights.items(), "2")
    assert api.client.weight_version() == "2"
    assert held_by(api) == sglang_checksums(weights.items())
    publisher.close()


def test_refused_announcement_is_an_error_at_once_though_the_broadcast_waits(api, broadcast):
    too_large_to_be_on_its_way = torch.zeros(1 << 24)
    with ThreadPoolExecutor(1) as pool:

        def submit(clients, call):
            return [pool.submit(call, client) for client in clients]

        broadcast.connect(submit)
        started = time.monotonic()
        with pytest.raises(EngineError, match="begin_weight_update"):
            broadcast.send([("model.norm.weight", too_large_to_be_on_its_way)], "1", submit)
        assert time.monotonic() - started < TIMEOUT_S / 2
        broadcast.disconnect(submit)


@pytest.mark.parametrize("buffer_bytes", [1, 1 << 29])
def test_update_through_shared_memory_leaves_the_trainers_bits(api, other_model_dir, buffer_bytes):
    """What a colocated run does: also with a bucket per weight, which cuts a fused tensor into its parts."""
    weights = load_file(str(other_model_dir / "model.safetensors"))
    publisher = WeightPublisher(
        [TensorTransport([api.client], timeout_s=TIMEOUT_S)], buffer_bytes=buffer_bytes, timeout_s=TIMEOUT_S
    )
    publisher.update(weights.items(), "3")
    publisher.close()
    assert api.client.weight_version() == "3"
    assert held_by(api) == sglang_checksums(weights.items())


def test_update_from_a_folder_leaves_the_trainers_bits_under_a_running_request(api, other_model_dir):
    weights, folder = load_file(str(other_model_dir / "model.safetensors")), VersionFolder(str(other_model_dir), 4)
    publisher = WeightPublisher([], clients=[api.client], buffer_bytes=1, timeout_s=TIMEOUT_S)
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(api.generate, PROMPT, {"max_new_tokens": 4000, "ignore_eos": True})
        api.wait_for_running(1)
        publisher.update(None, "4", finish=folder.load_into)
        api.wait_for_running(1)  # it was put back into the queue
        api.client.abort()
        spans = running.result(60)["meta_info"]["weight_versions"]
    publisher.close()
    assert spans[-1]["version"] == "4" and len(spans) == 2
    assert held_by(api) == sglang_checksums(weights.items())


def test_folder_that_an_engine_cannot_read_is_named_with_the_call_and_engines_go_on(api, tmp_path, other_model_dir):
    publisher = WeightPublisher([], clients=[api.client], buffer_bytes=1, timeout_s=TIMEOUT_S)
    with pytest.raises(RuntimeError, match=f"POST {api.url}/update_weights_from_disk answered 400: ....."):
        publisher.update(None, "1", finish=VersionFolder(str(tmp_path / "weight_v000001"), 1).load_into)
    assert len(api.greedy(PROMPT)["output_ids"]) == 8
    publisher.update(None, "2", finish=VersionFolder(str(other_model_dir), 2).load_into)
    publisher.close()
    assert api.client.weight_version() == "2"
