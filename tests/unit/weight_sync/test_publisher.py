"""The envelope of a weight update: order of the calls, one walk over the weights for all transports, recovery."""

from __future__ import annotations

import threading

import pytest
import torch

from slime.backends.weight_sync import publisher as publisher_module
from slime.backends.weight_sync import tensor as tensor_module
from slime.backends.weight_sync.publisher import WeightPublisher
from slime.backends.weight_sync.tensor import TensorTransport, largest_bucket
from slime.utils import platform
from slime.utils.engine_client import EngineError
from tests.unit.weight_sync.control_calls import FakeEngine

WEIGHTS = [("a", torch.arange(4.0)), ("b", torch.arange(100.0)), ("c", torch.ones(3)), ("d", torch.ones(2))]


def publisher_for(*engines, buffer_bytes: int = 64) -> WeightPublisher:
    return WeightPublisher([TensorTransport(list(engines), timeout_s=5)], buffer_bytes=buffer_bytes, timeout_s=5)


def holds(engine, weights) -> bool:
    return engine.held.keys() == {name for name, _ in weights} and all(
        torch.equal(engine.held[name], tensor) for name, tensor in weights
    )


def test_update_is_pause_flush_begin_buckets_end_version_continue():
    engine = FakeEngine()
    stats = publisher_for(engine).update(WEIGHTS, "3")
    assert engine.calls == ["pause", "flush", "begin", *3 * ["update"], "end", "version", "continue"]
    assert holds(engine, WEIGHTS) and engine.version == "3"
    assert stats == {"bytes": 4 * (4 + 100 + 3 + 2), "buckets": 3}  # b is larger than a bucket and travels alone


def test_every_engine_and_transport_gets_every_bucket_of_one_walk():
    engines = [FakeEngine(f"http://{i}") for i in range(3)]
    transports = [TensorTransport(engines[:2], timeout_s=5), TensorTransport(engines[2:], timeout_s=5)]
    walked = []
    weights = (walked.append(name) or (name, tensor) for name, tensor in WEIGHTS)
    WeightPublisher(transports, buffer_bytes=64, timeout_s=5).update(weights, "1")
    assert walked == ["a", "b", "c", "d"]
    assert all(holds(engine, WEIGHTS) for engine in engines)


@pytest.mark.parametrize("step", ["pause", "flush", "begin", "update", "end", "version", "continue"])
def test_after_a_failure_engines_go_on_and_the_next_update_works(step):
    broken, healthy = FakeEngine("http://broken", fail_at=step), FakeEngine("http://healthy")
    publisher = publisher_for(broken, healthy)
    with pytest.raises(RuntimeError, match=f"version 1 failed.*http://broken failed at {step}"):
        publisher.update(WEIGHTS, "1")
    for engine in (broken, healthy):
        assert not engine.is_paused and not engine.is_open
    publisher.update(WEIGHTS, "2")
    for engine in (broken, healthy):
        assert holds(engine, WEIGHTS) and engine.version == "2"


def test_engine_that_serves_another_version_than_it_was_sent_fails_the_update_and_goes_on():
    class Forgetful(FakeEngine):
        def update_weights_from_tensor(self, serialized, load_format, weight_version):
            super().update_weights_from_tensor(serialized, load_format, "0")

    forgetful, healthy = Forgetful("http://forgetful"), FakeEngine("http://healthy")
    with pytest.raises(RuntimeError, match="update to version 1 failed.*http://forgetful serves version '0'"):
        publisher_for(forgetful, healthy).update(WEIGHTS, "1")
    assert not forgetful.is_paused and not healthy.is_paused


def test_engine_that_is_gone_is_named_and_the_others_go_on():
    class Gone(FakeEngine):
        def _note(self, name):
            raise EngineError(f"{name}: no connection")

    gone, healthy = Gone("http://gone"), FakeEngine("http://healthy")
    with pytest.raises(RuntimeError, match="no connection. Engines that do not answer any more: http://gone. Look at"):
        publisher_for(gone, healthy).update(WEIGHTS, "1")
    assert healthy.calls[-1] == "continue" and not healthy.is_open


def test_engine_that_hangs_does_not_keep_the_others_from_going_on(monkeypatch):
    release = threading.Event()

    class Hanging(FakeEngine):
        def update_weights_from_tensor(self, *args, **kwargs):
            release.wait(20)

        def end_weight_update(self, timeout_s=None):
            raise EngineError("no answer")

    hanging, healthy = Hanging("http://hanging"), FakeEngine("http://healthy")
    monkeypatch.setattr(publisher_module, "REPLY_GRACE_S", 0.0)
    transport = TensorTransport([hanging, healthy], timeout_s=0.2)
    try:
        with pytest.raises(RuntimeError, match="no answer from an engine within 0.2 s.* any more: http://hanging"):
            WeightPublisher([transport], buffer_bytes=64, timeout_s=5).update(WEIGHTS, "1")
        assert not healthy.is_paused and not healthy.is_open
    finally:
        release.set()


def test_live_weights_are_not_moved_to_shared_memory():
    tensor = torch.ones(8)
    publisher_for(FakeEngine()).update([("a", tensor)], "1")
    assert not tensor.is_shared()


def test_bucket_that_does_not_fit_into_shared_memory_is_refused_before_it_is_written(monkeypatch):
    engine = FakeEngine()
    monkeypatch.setattr(platform, "shared_memory_free_bytes", lambda: 100)
    with pytest.raises(RuntimeError, match=r"400 bytes \(b.*100 bytes are free.*--shm-size"):
        publisher_for(engine, buffer_bytes=400).update(WEIGHTS[1:2], "1")
    assert engine.calls[-1] == "continue"


def test_buckets_of_all_ranks_of_a_node_fit_into_half_of_the_shared_memory(monkeypatch):
    monkeypatch.setattr(platform, "shared_memory_free_bytes", lambda: 64 * 2**20)
    assert largest_bucket(512 * 2**20, num_senders=2) == 16 * 2**20
    assert largest_bucket(1024, num_senders=2) == 1024


def test_buffer_is_written_again_in_later_updates_and_grows():
    engine = FakeEngine()
    transport = TensorTransport([engine], timeout_s=5)
    publisher = WeightPublisher([transport], buffer_bytes=1024, timeout_s=5)
    small, large = [("a", torch.ones(3))], [("a", torch.arange(100.0)), ("b", torch.ones(5))]
    buffers = []
    for version, weights in enumerate([small, large, small, large]):
        engine.held = {}
        publisher.update([(name, tensor + version) for name, tensor in weights], str(version))
        assert holds(engine, [(name, tensor + version) for name, tensor in weights])
        buffers.append(transport._kept)
    assert len(buffers[0]) == 12 and buffers[1] is buffers[2] is buffers[3] and len(buffers[1]) == 420


def test_kept_buffer_needs_no_room_in_shared_memory(monkeypatch):
    engine = FakeEngine()
    publisher = publisher_for(engine, buffer_bytes=1024)
    publisher.update(WEIGHTS, "1")
    monkeypatch.setattr(platform, "shared_memory_free_bytes", lambda: 0)
    publisher.update(WEIGHTS, "2")
    assert holds(engine, WEIGHTS) and engine.version == "2"


def test_buffer_of_a_failed_update_is_never_written_again():
    """An engine that did not answer may read it still."""
    engine = FakeEngine()
    transport = TensorTransport([engine], timeout_s=5)
    publisher = WeightPublisher([transport], buffer_bytes=1024, timeout_s=5)
    publisher.update(WEIGHTS, "1")
    engine.fail_at = "update"
    with pytest.raises(RuntimeError, match="failed at update"):
        publisher.update(WEIGHTS, "2")
    assert transport._kept is None


def test_large_buffer_is_given_back(monkeypatch):
    monkeypatch.setattr(tensor_module, "KEPT_BYTES", 100)
    transport = TensorTransport([FakeEngine()], timeout_s=5)
    WeightPublisher([transport], buffer_bytes=1024, timeout_s=5).update(WEIGHTS[1:2], "1")
    assert transport._kept is None
