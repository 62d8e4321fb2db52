"""What reaches an engine through each router: the reason for ours. When the sglang-router passes the field, ours can go."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace

import httpx
import pytest

from slime.ray.router import Router

CUSTOM = {"return_top_p_token_ids": True}
BODY = {
    "input_ids": [1, 2],
    "sampling_params": {"max_new_tokens": 1, "custom_params": CUSTOM},
    "return_routed_experts": True,
}


class FakeEngine(BaseHTTPRequestHandler):
    """Says that it is well and remembers what /generate was sent."""

    received: list[dict] = []

    def do_GET(self) -> None:
        self._answer({"model_path": "m", "tp_size": 1, "version": "0.5.23", "status": "ready"})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.received.append(body)
        self._answer({"text": "", "meta_info": {}})

    def _answer(self, body: dict) -> None:
        data = json.dumps(body).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_) -> None:
        """Nothing."""


@pytest.fixture
def engine():
    FakeEngine.received = []
    server = ThreadingHTTPServer(("127.0.0.1", 0), FakeEngine)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()


@pytest.mark.parametrize(
    ("replays", "top_p"), [(True, 1.0), (False, 0.9), (False, 1.0)], ids=["pass-through", "top-p", "sglang-router"]
)
def test_the_fields_of_replays_reach_the_engine_through_our_router_only(engine, tmp_path, replays, top_p):
    args = SimpleNamespace(
        run_dir=str(tmp_path), router_given={}, router_policy="round_robin", router_log_level="warn",
        sglang_router_request_timeout_secs=60, use_rollout_routing_replay=replays, rollout_top_p=top_p,
        multimodal_keys=None, eval_datasets=[],
    )  # fmt: skip
    router = Router(args, "127.0.0.1")
    try:
        router.start()
        router.add_workers([engine])
        httpx.post(f"{router.url}/generate", json=BODY, timeout=60, trust_env=False).raise_for_status()
        router.check_alive()
        os.kill(router._process.pid, signal.SIGKILL)
        with pytest.raises(RuntimeError, match="the router at http://127.0.0.1:.* died with status 137"):
            for _ in range(1200):
                router.check_alive()
                time.sleep(0.05)
    finally:
        router.stop()
    (received,) = FakeEngine.received
    assert received["input_ids"] == BODY["input_ids"]
    passes = replays or top_p < 1
    assert ("return_routed_experts" in received) is passes
    assert (received["sampling_params"].get("custom_params") == CUSTOM) is passes
