"""Start and stop engine processes, and short calls to one engine. No fixtures here."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import httpx

from slime.utils.engine_client import EngineClient

START_DEADLINE_S = 60.0
REPO = Path(__file__).resolve().parents[2]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def engine_command(model_path, port: int, *flags: str) -> list[str]:
    return [sys.executable, "-m", "slime.engine", "--model-path", str(model_path), "--port", str(port), *flags]


def engine_environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPO)}


def stop_process(process: subprocess.Popen, deadline_s: float = 5.0) -> None:
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(deadline_s)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(deadline_s)


@dataclass
class Api:
    """Short calls to one engine."""

    url: str

    def __post_init__(self) -> None:
        self.http = httpx.Client(base_url=self.url, trust_env=False, timeout=60, verify=False)
        self.client = EngineClient(self.url)

    def get(self, path: str) -> httpx.Response:
        return self.http.get(path)

    def post(self, path: str, body: dict | None = None, **options) -> httpx.Response:
        return self.http.post(path, json={} if body is None else body, **options)

    def generate(self, input_ids=None, sampling=None, **body) -> dict:
        """Answer of a /generate call that must succeed; `sampling` is sampling_params."""
        if input_ids is not None:
            body["input_ids"] = input_ids
        body.setdefault("return_logprob", True)
        response = self.post("/generate", {**body, "sampling_params": sampling or {}})
        assert response.status_code == 200, response.text
        return response.json()

    def greedy(self, input_ids, count: int = 8, **body) -> dict:
        return self.generate(input_ids, {"temperature": 0, "max_new_tokens": count, "ignore_eos": True}, **body)

    def wait_for_running(self, count: int, deadline_s: float = 10.0) -> None:
        start = time.monotonic()
        while True:
            loads = self.client.loads()
            if sum(load["num_running_reqs"] for load in loads) == count:
                return
            assert time.monotonic() - start < deadline_s, f"{count} running requests expected, last seen {loads}"
            time.sleep(0.005)

    def close(self) -> None:
        self.http.close()
        self.client.close()
