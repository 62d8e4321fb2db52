"""Plain HTTP to one server over kept connections, for synchronous code: little more than the standard library's client.

Invariants: proxies of the environment are not used; nothing is sent twice; a connection that the server closed while it was
idle is not used; usable from several threads, each call has a connection to itself. Knows no endpoint.
"""

from __future__ import annotations

import http.client
import json
import select
import socket
import threading
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit


@dataclass(frozen=True)
class Reply:
    """Status and body of an answer."""

    status_code: int
    content: bytes

    @property
    def text(self) -> str:
        return self.content.decode(errors="replace")

    def json(self) -> Any:
        """Raises: ValueError when the body is not JSON."""
        return json.loads(self.content)


class KeptConnections:
    """Connections to the server at `base_url` (http or https)."""

    def __init__(self, base_url: str):
        parts = urlsplit(base_url)
        self._host, self._port, self._prefix = parts.hostname, parts.port, parts.path.rstrip("/")
        self._kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        self._idle: list[http.client.HTTPConnection] = []
        self._lock = threading.Lock()

    def request(self, method: str, path: str, body: Any, timeout_s: float) -> Reply:
        """Send `body` as JSON (None: no body) and read the whole answer.

        Args:
            timeout_s: of connecting, and of every wait for bytes.
        Raises: TimeoutError, ConnectionRefusedError and other OSErrors, http.client.HTTPException.
        """
        connection = self._take(timeout_s)
        try:
            data, headers = (None, {}) if body is None else (json.dumps(body), {"Content-Type": "application/json"})
            connection.request(method, self._prefix + path, data, headers)
            response = connection.getresponse()
            reply = Reply(response.status, response.read())
        except BaseException:
            connection.close()
            raise
        if response.will_close:
            connection.close()
        else:
            with self._lock:
                self._idle.append(connection)
        return reply

    def close(self) -> None:
        with self._lock:
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()

    def _take(self, timeout_s: float) -> http.client.HTTPConnection:
        while True:
            with self._lock:
                connection = self._idle.pop() if self._idle else None
            if connection is None:
                return self._kind(self._host, self._port, timeout=timeout_s)
            if not _is_readable(connection.sock):
                connection.timeout = timeout_s
                connection.sock.settimeout(timeout_s)
                return connection
            connection.close()  # something came though nothing was asked: the server has closed it


def _is_readable(sock: socket.socket) -> bool:
    poll = select.poll()
    poll.register(sock, select.POLLIN)
    return bool(poll.poll(0))
