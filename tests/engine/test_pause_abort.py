"""Abort, the three pause modes, flush while busy."""

from __future__ import annotations

import os
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

LONG = {"temperature": 0, "max_new_tokens": 4000, "ignore_eos": True}  # more than a test waits for
PROMPT = [10, 20, 30]


@pytest.fixture
def pool():
    with ThreadPoolExecutor(8) as pool:
        yield pool


def start(api, pool, rid: str = "long"):
    future = pool.submit(api.generate, PROMPT, LONG, rid=rid)
    api.wait_for_running(1)
    return future


def wait_for_requests(api, count: int) -> None:
    """Give a request time to arrive; SGLang's counts stand still while it is paused."""
    give_up_at = time.monotonic() + (2 if os.environ.get("SLIME_ENGINE_KIND") == "sglang" else 60)
    while api.client.num_requests() < count and time.monotonic() < give_up_at:
        time.sleep(0.01)


def test_abort_by_rid_returns_the_partial_answer(api, pool):
    future = start(api, pool)
    assert api.post("/abort_request", {"rid": "long"}).status_code == 200
    answer = future.result(60)
    meta = answer["meta_info"]
    assert meta["finish_reason"]["type"] == "abort"
    assert meta["finish_reason"]["message"]
    assert 0 < meta["completion_tokens"] < 4000
    assert len(answer["output_ids"]) == len(meta["output_token_logprobs"]) == meta["completion_tokens"]
    whole = api.generate(PROMPT, {**LONG, "max_new_tokens": meta["completion_tokens"]})
    assert answer["output_ids"] == whole["output_ids"]
    assert answer["text"] == whole["text"]


def test_abort_of_another_rid_leaves_the_request_alone(api, pool):
    future = start(api, pool)
    api.client.abort("somebody else")
    assert not future.done()
    api.client.abort("long")
    future.result(60)


@pytest.mark.embedded_only  # SGLang ends them when it goes on
def test_abort_all_ends_running_and_waiting_requests(api, pool):
    future = start(api, pool)
    api.client.pause("in_place")
    queued = pool.submit(api.generate, PROMPT, LONG)
    wait_for_requests(api, 2)
    api.client.abort()
    assert future.result(60)["meta_info"]["finish_reason"]["type"] == "abort"
    assert queued.result(60)["meta_info"]["finish_reason"]["type"] == "abort"
    assert queued.result()["output_ids"] == []


def test_flush_is_refused_while_requests_run(api, pool):
    future = start(api, pool)
    assert api.get("/flush_cache").status_code == 400
    api.client.abort()
    future.result(60)
    assert api.get("/flush_cache").status_code == 200
    assert api.post("/flush_cache").status_code == 200


def test_pause_abort_ends_running_requests_and_holds_new_ones(api, pool):
    future = start(api, pool)
    answer = api.post("/pause_generation", {"mode": "abort"})
    assert answer.json()["status"] == "ok"
    assert future.result(60)["meta_info"]["finish_reason"]["type"] == "abort"
    new = pool.submit(api.greedy, PROMPT, 2)
    wait_for_requests(api, 1)
    assert not new.done()
    assert api.get("/flush_cache").status_code == 200
    api.client.continue_generation()
    assert new.result(60)["meta_info"]["completion_tokens"] == 2


@pytest.mark.parametrize(("mode", "flush_status"), [("retract", 200), ("in_place", 400)])
def test_paused_request_goes_on_with_the_same_tokens(api, pool, mode, flush_status):
    statuses = []
    (answer,) = api.interrupted(
        lambda: statuses.append(api.get("/flush_cache").status_code), [PROMPT], mode, temperature=0
    )
    assert statuses == [flush_status]
    length = answer["meta_info"]["completion_tokens"]
    expected = api.generate(PROMPT, {**LONG, "max_new_tokens": length})
    assert answer["output_ids"] == expected["output_ids"]
    assert answer["meta_info"]["finish_reason"] == {"type": "length", "length": length}
    assert answer["meta_info"]["num_retractions"] == (1 if mode == "retract" else 0)
    got = [entry[0] for entry in answer["meta_info"]["output_token_logprobs"]]
    assert got == pytest.approx([entry[0] for entry in expected["meta_info"]["output_token_logprobs"]], abs=1e-4)


@pytest.mark.embedded_only
def test_health_generate_answers_while_paused(api):
    api.client.pause("in_place")
    assert api.get("/health_generate").status_code == 200
    api.client.continue_generation()
    assert api.get("/health_generate").status_code == 200
