"""The process behind a rollout engine's address is the one that was started for it."""

from __future__ import annotations

import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from types import SimpleNamespace

import pytest

from slime.ray import engine_actor
from slime.utils.http_utils import find_free_port

SERVER = """
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer
class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.send_header("Content-Length", "0"); self.end_headers()
HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


class AnswersAll(BaseHTTPRequestHandler):
    def do_GET(self):  # noqa: N802
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_):
        pass


@pytest.fixture
def other_server():
    """Somebody else's server on this machine, which answers whatever it is asked."""
    server = HTTPServer(("127.0.0.1", 0), AnswersAll)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server.server_port
    server.shutdown()
    server.server_close()
    thread.join(5)


@pytest.fixture
def actor(tmp_path, monkeypatch):
    import sys

    def command(args, *, rank, host, port, base_device):
        return [sys.executable, "-S", "-c", SERVER, str(port)]

    monkeypatch.setattr(engine_actor, "engine_command", command)
    monkeypatch.setattr(engine_actor, "engine_environment", lambda args: None)
    actor = engine_actor.EngineActor(SimpleNamespace(run_dir=str(tmp_path)), rank=0, base_device=0)
    yield actor
    actor.stop()


def test_fb_o09_engine_whose_port_was_taken_meanwhile_gets_another(actor, other_server, monkeypatch):
    ports = [other_server, other_server, find_free_port()]
    monkeypatch.setattr(engine_actor, "find_free_port", lambda host: ports.pop(0))
    last = ports[-1]
    assert actor.start("127.0.0.1") == f"http://127.0.0.1:{last}"
    assert actor.is_alive()


def test_engine_that_never_gets_a_port_is_an_error(actor, other_server, monkeypatch):
    monkeypatch.setattr(engine_actor, "find_free_port", lambda host: other_server)
    with pytest.raises(RuntimeError, match="rollout engine 0"):
        actor.start("127.0.0.1")
