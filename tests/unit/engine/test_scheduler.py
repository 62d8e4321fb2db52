"""The engine thread: death, shutdown, sleep, order of control calls. A generator without a model stands in."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest

from slime.engine.batch import RunningBatch
from slime.engine.requests import Request
from slime.engine.sampling_params import SamplingParams
from slime.engine.scheduler import EngineDead, Scheduler

DEADLINE_S = 5.0


class NoCache:
    max_rows, length = 4, 0

    def rows_that_fit(self, length: int) -> int:
        return self.max_rows


class OneTokenGenerator:
    """Ends every request with its first token, 5; raises `failure` when set."""

    def __init__(self):
        self.batch, self.cache = RunningBatch(4), NoCache()
        self.tokenizer = SimpleNamespace(
            decode_batch=lambda batch, skip: ["text"] * len(batch), final_text=lambda text, params, reason: text
        )
        self.failure: Exception | None = None

    def prefill(self, families):
        if self.failure:
            raise self.failure
        first = self.batch.size
        for request in [request for family in families for request in family]:
            self.batch.add(request)
        count = self.batch.size - first
        self.batch.record(first, np.full(count, 5), np.zeros(count, dtype=np.float32))
        return {first + i: {"type": "length", "length": 1} for i in range(count)}

    def remove(self, rows):
        self.batch.remove(rows)

    finish = remove

    def find_prefix(self, request):
        """Nothing is kept."""

    def make_room(self, num_new, length):
        """Nothing to reserve."""


class Ended:
    """Collects requests that ended."""

    def __init__(self):
        self.requests: list[Request] = []
        self._arrived = threading.Condition()

    def __call__(self, events) -> None:
        with self._arrived:
            self.requests += [request for request, chunk in events if chunk is None]
            self._arrived.notify_all()

    def wait_for(self, count: int) -> list[Request]:
        with self._arrived:
            assert self._arrived.wait_for(lambda: len(self.requests) >= count, DEADLINE_S), self.requests
        return self.requests


def request(rid: str) -> Request:
    return Request(rid, [1, 2], SamplingParams(max_new_tokens=1), seed=1, stop_ids=())


@pytest.fixture
def ended():
    return Ended()


@pytest.fixture
def scheduler(ended):
    scheduler = Scheduler(OneTokenGenerator(), "v", ended)
    scheduler.start()
    yield scheduler
    scheduler.stop(DEADLINE_S)


def test_request_ends_with_text_and_version(scheduler, ended):
    scheduler.submit(request("a"))
    (done,) = ended.wait_for(1)
    assert (done.output_ids, done.text, done.weight_version) == ([5], "text", "v")
    assert done.version_spans() == [{"version": "v", "start": 0, "end": 1}]


def test_more_requests_than_rows_are_all_served(scheduler, ended):
    for i in range(11):
        scheduler.submit(request(str(i)))
    assert [r.rid for r in ended.wait_for(11)] == [str(i) for i in range(11)]


def test_death_of_the_thread_answers_everything_with_the_reason(scheduler, ended):
    scheduler.call(lambda: scheduler.pause("in_place")).result(DEADLINE_S)
    for rid in ("a", "b"):
        scheduler.submit(request(rid))
    scheduler.generator.failure = RuntimeError("out of memory")
    scheduler.call(scheduler.resume).result(DEADLINE_S)
    for done in ended.wait_for(2):
        assert "RuntimeError: out of memory" in done.error
        assert done.finish_reason is None
    assert "out of memory" in scheduler.failure
    with pytest.raises(EngineDead, match="out of memory"):
        scheduler.submit(request("late"))
    with pytest.raises(EngineDead, match="out of memory"):
        scheduler.call(lambda: None)


def test_stop_answers_what_is_queued(scheduler, ended):
    scheduler.call(lambda: scheduler.pause("in_place")).result(DEADLINE_S)
    scheduler.submit(request("a"))
    scheduler.stop(DEADLINE_S)
    assert "shutting down" in ended.wait_for(1)[0].error


def test_failing_control_call_leaves_the_engine_alive(scheduler, ended):
    with pytest.raises(ValueError, match="pause mode 'x'"):
        scheduler.call(lambda: scheduler.pause("x")).result(DEADLINE_S)
    scheduler.submit(request("a"))
    ended.wait_for(1)


def test_control_calls_keep_their_place_in_the_queue(scheduler, ended):
    scheduler.call(lambda: scheduler.pause("in_place"))
    scheduler.submit(request("a"))
    scheduler.call(lambda: scheduler.abort(None)).result(DEADLINE_S)
    assert ended.wait_for(1)[0].finish_reason["type"] == "abort"


def test_callers_that_go_away_leave_the_engine_alive(scheduler, ended):
    started, go_on = threading.Event(), threading.Event()
    running = scheduler.call(lambda: (started.set(), go_on.wait(DEADLINE_S)))
    assert started.wait(DEADLINE_S)
    queued = scheduler.call(lambda: None)
    assert queued.cancel()
    assert not running.cancel()
    go_on.set()
    running.result(DEADLINE_S)
    scheduler.submit(request("a"))
    ended.wait_for(1)


def test_idle_thread_sleeps(scheduler):
    clock = time.pthread_getcpuclockid(scheduler._thread.ident)
    before = time.clock_gettime(clock)
    time.sleep(0.2)
    assert time.clock_gettime(clock) - before < 0.1
