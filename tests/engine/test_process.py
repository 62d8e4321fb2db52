"""The engine as a process: port clashes, signals, parent death, clients that go away. Embedded engine only."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time

import pytest

from slime.utils.engine_client import EngineClient
from tests.engine.engine_process import (
    START_DEADLINE_S,
    Api,
    engine_command,
    engine_environment,
    free_port,
    serving,
    stop_process,
)

pytestmark = pytest.mark.skipif("SLIME_ENGINE_URL" in os.environ, reason="starts engines of its own")
DEADLINE_S = 60.0


def run_to_exit(command: list[str]) -> subprocess.CompletedProcess:
    return subprocess.run(command, env=engine_environment(), capture_output=True, text=True, timeout=START_DEADLINE_S)


def test_taken_port_is_a_clear_error(model_dir):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = run_to_exit(engine_command(model_dir, port))
    assert done.returncode == 1
    assert f"--port {port}" in done.stderr
    assert "Traceback" not in done.stderr


def test_unsupported_architecture_is_refused_with_the_supported_ones(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["MambaForCausalLM"]}))
    done = run_to_exit(engine_command(tmp_path, free_port()))
    assert done.returncode == 1
    assert "MambaForCausalLM" in done.stderr
    assert "Qwen3ForCausalLM" in done.stderr


def test_flag_out_of_range_is_refused_by_name(model_dir):
    done = run_to_exit(engine_command(model_dir, free_port(), "--max-running-requests", "0"))
    assert done.returncode == 1
    assert "--max-running-requests" in done.stderr


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_ends_an_engine_that_has_work_for_minutes(model_dir, number):
    sampling = {"max_new_tokens": 4000, "ignore_eos": True, "n": 256}
    body = json.dumps({"input_ids": [1], "sampling_params": sampling}).encode()
    with serving(model_dir) as (url, process):
        with send_raw(url, body):
            api = Api(url)
            wait_until(lambda: api.num_running() > 0, "requests that run")
            process.send_signal(number)
            assert process.wait(DEADLINE_S) == 0
            api.close()


def test_engine_ends_when_its_parent_dies(model_dir):
    port = free_port()
    command = engine_command(model_dir, port, "--log-level", "warning")
    launcher = (
        "import os, subprocess, sys, time\n"
        f"subprocess.Popen({command!r} + ['--parent-pid', str(os.getpid())])\n"
        "time.sleep(300)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", launcher], env=engine_environment())
    try:
        with EngineClient(f"http://127.0.0.1:{port}") as client:
            client.wait_ready(START_DEADLINE_S, lambda: parent.poll() is None)
            parent.kill()
            parent.wait(DEADLINE_S)
            wait_until(lambda: not accepts(port), "the engine to end after its parent")
    finally:
        stop_process(parent)


def accepts(port: int) -> bool:
    """Whether somebody listens there, however slowly it answers."""
    try:
        socket.create_connection(("127.0.0.1", port)).close()
    except OSError:
        return False
    return True


def wait_until(condition, what: str) -> None:
    give_up_at = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < give_up_at, f"waited {DEADLINE_S} s for {what}"
        time.sleep(0.02)


def send_raw(url: str, body: bytes) -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", int(url.rsplit(":", 1)[1])))
    head = (
        f"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    connection.sendall(head.encode() + body)
    return connection


@pytest.mark.parametrize("stream", [False, True])
def test_client_that_goes_away_frees_its_slot(api, engine_url, stream):
    sampling = {"max_new_tokens": 4000, "ignore_eos": True}
    body = json.dumps({"input_ids": [1], "stream": stream, "sampling_params": sampling}).encode()
    before = generated_tokens(api)
    with send_raw(engine_url, body):
        api.wait_for_running(1)
    api.wait_for_running(0)
    assert 0 < generated_tokens(api) - before < 4000


def generated_tokens(api) -> int:
    (line,) = (line for line in api.get("/metrics").text.splitlines() if "generation_tokens_total{" in line)
    return int(float(line.rsplit(" ", 1)[1]))
