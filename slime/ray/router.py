"""The router in front of a model's engines: the real sglang-router, started through its Python API, or ours.

Ours passes bodies through untouched and serves runs whose requests have fields that the sglang-router drops. Retries are off: the rollout client decides what is sent again. Workers are managed with POST/GET/DELETE ``/workers``.
"""

from __future__ import annotations

import json
import os
import sys
import time
from contextlib import closing, suppress
from http.client import HTTPException

from slime.utils import supervise
from slime.utils.http_utils import find_free_port
from slime.utils.kept_connections import KeptConnections

_START_DEADLINE_S = 60.0
_WORKERS_DEADLINE_S = 120.0
_POLL_S = 0.1
_CALL_S = 30.0
_START_ATTEMPTS = 3


class Router:
    """A router process on this node. ``start`` it, ``add_workers``, talk to ``host:port``, ``stop`` it."""

    def __init__(self, args, host: str):
        self._args, self.host = args, host
        self.port = 0
        self._process: supervise.Supervised | None = None
        self._log_path = os.path.join(args.run_dir, "logs", "router.log")
        self.kept_fields = fields_to_keep(args)
        self._module = "slime.ray.pass_through_router" if self.kept_fields else "slime.ray.router_main"

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}"

    def start(self) -> None:
        """Start the process and wait until it answers; a port taken meanwhile is replaced by another."""
        for attempt in range(_START_ATTEMPTS):
            self.port = find_free_port(self.host)
            fields = self._args.router_given | {
                "host": self.host,
                "port": self.port,
                "prometheus_port": find_free_port(self.host),
                "prometheus_host": self.host,
                "policy": self._args.router_policy,
                "log_level": self._args.router_log_level,
                "request_timeout_secs": self._args.sglang_router_request_timeout_secs,
                "worker_startup_timeout_secs": int(_WORKERS_DEADLINE_S),
                "disable_retries": True,
                "disable_circuit_breaker": True,
                "disable_health_check": True,
            }
            command = [sys.executable, "-m", self._module, json.dumps(fields)]
            self._process = supervise.start(command, self._log_path)
            if self._wait_alive():
                return
            self.stop()
            if attempt == _START_ATTEMPTS - 1:
                tail = supervise.log_tail(self._log_path)
                raise RuntimeError(
                    f"the router did not answer at {self.url}/liveness within {_START_DEADLINE_S:.0f} s. "
                    f"End of its log {self._log_path}:\n{tail}"
                )

    def _wait_alive(self) -> bool:
        give_up_at = time.monotonic() + _START_DEADLINE_S
        with closing(KeptConnections(self.url)) as connections:
            while time.monotonic() < give_up_at and self._process.poll() is None:
                with suppress(OSError, HTTPException):
                    if connections.request("GET", "/liveness", None, 5.0).status_code == 200:
                        return True
                time.sleep(_POLL_S)
        return False

    def add_workers(self, engine_urls: list[str]) -> None:
        """Register engines and wait until the router holds each as healthy."""
        with closing(KeptConnections(self.url)) as connections:
            for url in engine_urls:
                self._ask(connections, "POST", {"url": url, "worker_type": "regular"})
            started = time.monotonic()
            workers: list[dict] = []
            while time.monotonic() - started < _WORKERS_DEADLINE_S:
                workers = self._ask(connections, "GET")["workers"]
                healthy = {worker["url"].rstrip("/") for worker in workers if worker.get("is_healthy")}
                if healthy >= set(engine_urls):
                    return
                time.sleep(_POLL_S)
        raise RuntimeError(
            f"the router at {self.url} did not accept the engines {sorted(engine_urls)} within "
            f"{_WORKERS_DEADLINE_S:.0f} s; it holds {workers}. See {self._log_path}"
        )

    def _ask(self, connections: KeptConnections, method: str, body: dict | None = None) -> dict:
        reply = connections.request(method, "/workers", body, _CALL_S)
        if reply.status_code >= 300:
            raise RuntimeError(f"{method} {self.url}/workers answered {reply.status_code}: {reply.text[:500]}")
        return reply.json()

    def check_alive(self) -> None:
        """Raise RuntimeError with the end of its log when the process ended."""
        status = self._process.poll() if self._process is not None else None
        if status is not None:
            tail = supervise.log_tail(self._log_path)
            raise RuntimeError(
                f"the router at {self.url} died with status {status}. End of its log {self._log_path}:\n{tail}"
            )

    def stop(self) -> None:
        if self._process is not None:
            self._process.stop()


def fields_to_keep(args) -> list[str]:
    """Return the request fields of this run that the sglang-router would drop without a word."""
    fields = ["return_routed_experts"] if args.use_rollout_routing_replay else []
    fields += ["custom_params"] if args.rollout_top_p != 1.0 else []
    sources = (args.multimodal_keys, *(item.multimodal_keys for item in args.eval_datasets))
    kinds = {kind for keys in sources for kind in keys or ()}
    return fields + [f"{kind}_data" for kind in ("video", "audio") if kind in kinds]
