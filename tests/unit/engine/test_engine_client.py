"""EngineClient against a scripted server: retries, deadlines, fallbacks, error texts."""

from __future__ import annotations

import json
import select
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from slime.utils.engine_client import EngineClient, EngineError


class ScriptedServer:
    """Answers a path with the next scripted (status, body), the last one for ever; unknown paths get 404."""

    def __init__(self):
        self.script: dict[str, list[tuple[int, object]]] = {}
        self.calls: list[tuple[str, str, object]] = []
        owner = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def answer(self) -> None:
                size = int(self.headers.get("Content-Length") or 0)
                body = json.loads(self.rfile.read(size)) if size else None
                owner.calls.append((self.command, self.path, body))
                answers = owner.script.get(self.path, [(404, "no such path")])
                status, content = answers.pop(0) if len(answers) > 1 else answers[0]
                raw = content.encode() if isinstance(content, str) else json.dumps(content).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(raw)))
                self.end_headers()
                self.wfile.write(raw)

            do_GET = do_POST = answer

            def log_message(self, *_: object) -> None:
                """Keep the test output clean."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(60)


@pytest.fixture
def server():
    server = ScriptedServer()
    yield server
    server.close()


@pytest.fixture
def client(server):
    with EngineClient(server.url, timeout_s=60) as client:
        yield client


@pytest.mark.parametrize("status", [400, 404, 422, 500, 503])
def test_error_is_raised_at_once_with_the_engines_words(server, client, status):
    server.script["/weights_checker"] = [(status, "the reason is here")]
    with pytest.raises(EngineError, match="the reason is here") as caught:
        client.weights_checker("compare")
    assert caught.value.status == status
    assert len(server.calls) == 1


def test_success_false_counts_as_failure(server, client):
    server.script["/update_weights_from_disk"] = [(200, {"success": False, "message": "bad folder"})]
    with pytest.raises(EngineError, match="bad folder"):
        client.update_weights_from_disk("/x")


def test_flush_waits_for_a_busy_engine(server, client):
    server.script["/flush_cache"] = [(400, "busy"), (400, "busy"), (200, "flushed")]
    client.flush_cache(deadline_s=60)
    assert len(server.calls) == 3


def test_flush_deadline_names_the_wait_and_the_last_answer(server, client):
    server.script["/flush_cache"] = [(400, "still 3 running")]
    with pytest.raises(EngineError, match=r"not flushed after 0.2 s.*still 3 running"):
        client.flush_cache(deadline_s=0.2)


def test_begin_and_end_are_optional_for_older_servers(server, client):
    client.begin_weight_update()
    client.end_weight_update()
    assert [path for _, path, _ in server.calls] == ["/begin_weight_update", "/end_weight_update"]
    server.script["/begin_weight_update"] = [(400, "refused")]
    with pytest.raises(EngineError, match="refused"):
        client.begin_weight_update()


def test_info_and_version_fall_back_to_older_paths(server, client):
    server.script["/get_server_info"] = [(200, {"tp_size": 2})]
    server.script["/model_info"] = [(200, {"weight_version": 7})]
    assert client.server_info() == {"tp_size": 2}
    assert client.weight_version() == "7"


def test_bodies_of_weight_calls(server, client):
    for path in (
        "/init_weights_update_group",
        "/update_weights_from_distributed",
        "/pause_generation",
        "/abort_request",
    ):
        server.script[path] = [(200, {"success": True})]
    client.init_weights_update_group("127.0.0.1", 5, 1, 2, "g", "gloo")
    client.update_weights_from_distributed(["a"], ["bfloat16"], [(2, 3)], "g", weight_version="4")
    client.pause("retract")
    client.abort()
    client.abort("r")
    bodies = [body for _, _, body in server.calls]
    assert bodies[0] == {
        "master_address": "127.0.0.1",
        "master_port": 5,
        "rank_offset": 1,
        "world_size": 2,
        "group_name": "g",
        "backend": "gloo",
    }
    assert bodies[1] == {
        "names": ["a"],
        "dtypes": ["bfloat16"],
        "shapes": [[2, 3]],
        "group_name": "g",
        "flush_cache": False,
        "weight_version": "4",
    }
    assert bodies[2:] == [{"mode": "retract"}, {"abort_all": True}, {"rid": "r"}]


@pytest.mark.parametrize(
    "answer",
    [
        [{"num_reqs": 3}],
        {"loads": [{"num_total_reqs": 3}]},
        {"loads": [{"num_running_reqs": 2, "num_waiting_reqs": 1}]},
        {"loads": [{"total_reqs": 1}, {"total_reqs": 2}]},
    ],
)
def test_load_forms_of_all_servers_are_understood(server, client, answer):
    server.script["/v1/loads?include=core"] = [(200, answer)]
    assert client.num_requests() == 3


def test_wait_ready_ends_when_the_engine_generates(server, client):
    server.script["/health_generate"] = [(503, "loading"), (200, "ok")]
    client.wait_ready(60)
    assert len(server.calls) == 2


def test_wait_ready_gives_up_when_the_process_ended(client):
    alive = iter([True, False])
    with pytest.raises(EngineError, match="process ended"):
        client.wait_ready(60, lambda: next(alive))


def test_wait_ready_deadline_shows_what_was_seen_last(server, client):
    server.script["/health_generate"] = [(503, "still loading weights")]
    with pytest.raises(EngineError, match=r"not ready after 0.2 s.*still loading weights"):
        client.wait_ready(0.2)


def test_refused_connection_is_an_error_after_the_retries():
    with EngineClient("http://127.0.0.1:9", connect_retries=1) as client:
        with pytest.raises(EngineError, match=r"no connection after 2 attempt"):
            client.model_info()
        assert not client.is_healthy()


def test_silent_engine_is_an_error_with_the_deadline(server):
    gave_up = threading.Event()
    with EngineClient(server.url, timeout_s=0.2) as client:
        server._server.RequestHandlerClass.do_POST = lambda handler: gave_up.wait(60)
        with pytest.raises(EngineError, match="no answer within 0.2 s"):
            client.pause()
        gave_up.set()


def test_proxies_of_the_environment_are_not_used(server, monkeypatch):
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    server.script["/health"] = [(200, "ok")]
    with EngineClient(server.url) as client:
        assert client.is_healthy()


def test_connection_is_kept_from_call_to_call_and_between_threads_never_shared(server, client):
    server.script["/health"] = [(200, "ok")]
    accepted, get_request = [], server._server.get_request

    def counted():
        accepted.append(1)
        return get_request()

    server._server.get_request = counted
    assert all(client.is_healthy() for _ in range(5)) and len(accepted) == 1
    original, together = server._server.RequestHandlerClass.answer, threading.Barrier(3)

    def answer_together(handler):
        together.wait(60)
        original(handler)

    server._server.RequestHandlerClass.do_GET = answer_together
    threads = [threading.Thread(target=client.is_healthy) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not together.broken and len(accepted) == 3


def test_connection_that_the_server_closed_meanwhile_is_not_used(server, client):
    server.script["/weights_checker"] = [(200, {"success": True})]
    original = server._server.RequestHandlerClass.answer

    def answer_and_leave(handler):
        original(handler)
        handler.close_connection = True

    server._server.RequestHandlerClass.do_POST = answer_and_leave
    for _ in range(3):
        client.weights_checker("snapshot")
        wait_until_closed(client)
    assert len(server.calls) == 3


def wait_until_closed(client):
    sock = client._http._idle[0].sock
    assert select.select([sock], [], [], 60)[0], "the server did not close the connection"
