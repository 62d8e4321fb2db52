"""One rollout engine: starts the HTTP server on its slot, waits for it and watches it.

A Ray actor on the slot's node, or on a run's only machine an object in the rollout process.

It knows nothing of requests: after ``start`` everybody talks to the server's address.
"""

from __future__ import annotations

import os
import time

from slime.backends.sglang_utils.launch import engine_command, engine_environment
from slime.utils import supervise
from slime.utils.http_utils import find_free_port

START_DEADLINE_S = 900.0  # a large model from a slow disk; the embedded engine needs seconds
_PORT_ATTEMPTS = 5


class EngineActor:
    """Owns the server process of engine ``rank``; ``base_device`` is its first device on this node."""

    def __init__(self, args, rank: int, base_device: int):
        self._args, self._rank, self._base_device = args, rank, base_device
        self._process: supervise.Supervised | None = None
        self._log_path = os.path.join(args.run_dir, "logs", f"engine_{rank}.log")

    def start(self, host: str) -> str:
        """Start the server on a free port of ``host`` and wait until it answers. Returns its base URL.

        Raises:
            RuntimeError: it ended, or did not answer in time; the message holds the end of its log.
        """
        for attempt in range(_PORT_ATTEMPTS):
            port = find_free_port(host)
            command = engine_command(self._args, rank=self._rank, host=host, port=port, base_device=self._base_device)
            self._process = supervise.start(command, self._log_path, env=engine_environment(self._args))
            url = f"http://{host}:{port}"
            # Another process may have taken the port between the choice and the bind: ours ends, or that one answers.
            try:
                self._wait_ready(url)
            except RuntimeError:
                taken = "address already in use" in supervise.log_tail(self._log_path).lower()
                if not taken or attempt == _PORT_ATTEMPTS - 1:
                    raise
                continue
            if self._listens_at(port):
                return url
            self.stop()
        raise RuntimeError(f"rollout engine {self._rank}: {_PORT_ATTEMPTS} ports in turn were taken by other processes")

    def _wait_ready(self, url: str) -> None:
        from slime.utils.engine_client import EngineClient

        started = time.monotonic()
        try:
            EngineClient(url).wait_ready(deadline_s=START_DEADLINE_S, is_alive=self.is_alive)
        except Exception as error:
            waited_s = time.monotonic() - started
            tail = supervise.log_tail(self._log_path)
            self.stop()
            raise RuntimeError(
                f"rollout engine {self._rank} at {url} did not become ready ({error}; waited {waited_s:.0f} s). "
                f"End of its log {self._log_path}:\n{tail}"
            ) from None

    def _listens_at(self, port: int) -> bool:
        """Whether it is our server that answers at ``port``."""
        import psutil

        try:
            server = psutil.Process(self._process.pid)
            sockets = [at for p in (server, *server.children(recursive=True)) for at in p.net_connections("tcp")]
        except psutil.NoSuchProcess:
            return False
        return any(at.status == psutil.CONN_LISTEN and at.laddr.port == port for at in sockets)

    def is_alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def log_tail(self) -> str:
        return supervise.log_tail(self._log_path)

    def stop(self) -> None:
        if self._process is not None:
            self._process.stop()
