"""Start and stop engine processes, and short calls to one engine. No fixtures here."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx

from slime.utils.engine_client import EngineClient

START_DEADLINE_S = 120.0
REPO = Path(__file__).resolve().parents[2]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def engine_command(model_path, port: int, *flags: str) -> list[str]:
    return [sys.executable, "-m", "slime.engine", "--model-path", str(model_path), "--port", str(port), *flags]


def engine_environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPO)}


def stop_process(process: subprocess.Popen, deadline_s: float = 30.0) -> None:
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(deadline_s)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(deadline_s)


@contextmanager
def serving(model_path, *flags: str) -> Iterator[tuple[str, subprocess.Popen]]:
    """(address, process) of an engine that is ready; it ends with the block."""
    port = free_port()
    command = engine_command(model_path, port, "--log-level", "warning", *flags)
    process = subprocess.Popen(command, env=engine_environment())
    try:
        with EngineClient(f"http://127.0.0.1:{port}") as client:
            client.wait_ready(START_DEADLINE_S, lambda: process.poll() is None)
        yield f"http://127.0.0.1:{port}", process
    finally:
        stop_process(process)


@dataclass
class Api:
    """Short calls to one engine."""

    url: str

    def __post_init__(self) -> None:
        self.http = httpx.Client(base_url=self.url, trust_env=False, timeout=120, verify=False)
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

    def wait_for_running(self, count: int, deadline_s: float = 60.0) -> None:
        start = time.monotonic()
        while (running := self.num_running()) != count:
            assert time.monotonic() - start < deadline_s, f"{count} running requests expected, {running} are seen"
            time.sleep(0.005)

    def num_running(self) -> int:
        return sum(load["num_running_reqs"] for load in self.client.loads())

    def interrupted(
        self, act: Callable[[], None], prompts: list[list[int]], mode: str = "in_place", **sampling
    ) -> list[dict]:
        """Answers of one call per prompt; `act()` ran while all of them were paused with some of their tokens.

        They end at their limit. Where one came to it before the pause, all are asked again for more tokens.
        """
        for max_new_tokens in (400, 1200, 3600):
            params = {**sampling, "max_new_tokens": max_new_tokens, "ignore_eos": True}
            with ThreadPoolExecutor(len(prompts)) as pool:
                futures = [pool.submit(self.generate, prompt, params) for prompt in prompts]
                while self.num_running() < len(prompts) and not any(future.done() for future in futures):
                    time.sleep(0.005)
                self.client.pause(mode)
                are_caught = self.client.num_requests() == len(prompts)
                try:
                    if are_caught:
                        act()
                finally:
                    self.client.continue_generation()
                answers = [future.result(120) for future in futures]
            if are_caught:
                return answers
        raise AssertionError(f"{len(prompts)} requests of {max_new_tokens} tokens were never running together")

    def close(self) -> None:
        self.http.close()
        self.client.close()
