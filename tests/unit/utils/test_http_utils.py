import asyncio
import socket

import pytest
from fake_engine import FakeEngine, reply

from slime.utils import http_utils
from slime.utils.async_utils import run
from slime.utils.http_utils import (
    HeldPort,
    HTTPStatusError,
    find_free_port,
    format_host,
    get,
    get_host_ip,
    is_port_open,
    post,
)


def test_fb_a19_a_400_fails_at_once_with_the_body(engine):
    engine.answer = lambda payload: 400
    with pytest.raises(HTTPStatusError, match="answered 400.*status 400") as error:
        run(post(f"{engine.url}/generate", {"rid": "a"}))
    assert len(engine.requests) == 1 and error.value.status == 400


def test_a_500_is_not_repeated(engine):
    engine.answer = lambda payload: 500
    with pytest.raises(HTTPStatusError):
        run(post(f"{engine.url}/generate", {}))
    assert len(engine.requests) == 1


def test_a_router_that_lost_its_engine_is_asked_again(engine):
    answers = iter([(500, "call_upstream_request_error: error sending request"), reply([1])])
    engine.answer = lambda payload: next(answers)
    assert run(post(f"{engine.url}/generate", {}))["meta_info"]["output_token_logprobs"][0][1] == 1


def test_fb_a19_max_retries_bounds_the_attempts_on_503(engine):
    engine.answer = lambda payload: 503
    with pytest.raises(RuntimeError, match="2 attempts.*status 503"):
        run(post(f"{engine.url}/generate", {}, max_retries=2))
    assert len(engine.requests) == 2


def test_fb_a19_a_cured_503_gives_one_accepted_generation_with_the_same_request_id(engine):
    answers = iter([503, 429, 502, reply([1])])
    engine.answer = lambda payload: next(answers)
    output = run(post(f"{engine.url}/generate", {"rid": "a"}))
    assert output["meta_info"]["output_token_logprobs"][0][1] == 1
    assert [request["rid"] for request in engine.requests] == ["a"] * 4


def test_no_connection_is_repeated_until_the_budget_ends():
    with HeldPort() as held, pytest.raises(RuntimeError, match="3 attempts.*last: ClientConnector"):
        run(post(f"http://127.0.0.1:{held.port}/generate", {}, max_retries=3))


def test_a_silent_server_runs_into_the_deadline(engine):
    engine.answer = lambda payload: "hang"
    with pytest.raises(RuntimeError, match="no answer within 0.1 s"):
        run(post(f"{engine.url}/generate", {}, deadline_s=0.1))


def test_fb_a21_system_proxies_are_not_used(engine, monkeypatch):
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")

    async def fresh_session():
        try:
            return await get(f"{engine.url}/workers")
        finally:
            await http_utils.close_session()

    assert asyncio.run(fresh_session())["workers"]


def test_text_bodies_are_returned_as_text(engine):
    assert run(post(f"{engine.url}/abort_request", {"abort_all": True})) == ""


def test_each_loop_has_its_own_session():
    async def session():
        found = http_utils.get_session()
        assert found is http_utils.get_session()
        await http_utils.close_session()
        return found

    assert asyncio.run(session()) is not asyncio.run(session())


def test_a_held_port_cannot_be_taken():
    with HeldPort() as held:
        with pytest.raises(OSError), socket.socket() as other:
            other.bind(("127.0.0.1", held.port))
        with pytest.raises(RuntimeError, match="no free port"):
            HeldPort(candidates=range(held.port, held.port + 1))
    with socket.socket() as other:
        other.bind(("127.0.0.1", held.port))


def test_host_and_port_probes(engine, monkeypatch):
    assert is_port_open("127.0.0.1", engine.port)
    assert not is_port_open("127.0.0.1", find_free_port(), timeout_s=0.2)
    monkeypatch.setenv("SLIME_HOST_IP", "10.1.2.3")
    assert get_host_ip() == "10.1.2.3"
    monkeypatch.delenv("SLIME_HOST_IP")
    assert get_host_ip()
    assert format_host("::1") == "[::1]"


def test_run_from_its_own_loop_is_refused():
    async def nested():
        async def inner(): ...

        run(inner())

    with pytest.raises(RuntimeError, match="await the coroutine instead"):
        run(nested())


def test_fake_engine_counts_aborts():
    fake = FakeEngine()
    try:
        run(post(f"{fake.url}/abort_request", {}))
        assert fake.aborts == 1
    finally:
        fake.stop()


def test_what_strict_json_lacks_is_read_and_sent_all_the_same():
    assert http_utils._decode(b'{"logprob": NaN}')["logprob"] != 0
    assert http_utils._decode(b"plain text") == "plain text"
    assert http_utils._decode(http_utils._encode({"big": 2**70, 1: "key"})) == {"big": 2**70, "1": "key"}
