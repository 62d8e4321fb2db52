"""HTTP client of the rollout side, and probing of hosts and ports.

Invariants: only failures that a later attempt can cure are repeated (no connection, a router that lost its engine, 429,
502, 503), within a budget of attempts and a deadline, after as long as the server asks for; any other status but success
raises at once with the body. What is sent never goes to another server than the one that was named. System proxies are
never used. One session per event loop. Knows no endpoint.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import contextvars
import json
import os
import socket
import time
import urllib.parse
import weakref
from collections.abc import Iterator
from typing import Any, Protocol

RETRIED_STATUS = (429, 502, 503)
ROUTER_LOST_ENGINE = "call_upstream"  # error code of a router's 500 that means: the engine did not answer me
MAX_BACKOFF_S = 2.0
CONNECT_TIMEOUT_S = 30.0
MAX_REDIRECTS = 3
MAX_RETRY_AFTER_S = 30.0

_sessions: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, Any] = weakref.WeakKeyDictionary()
_deadline_s = 14400.0
_observer: contextvars.ContextVar[Observer | None] = contextvars.ContextVar("slime_post_observer", default=None)


class Observer(Protocol):
    """Is told of the requests of a context, see `observed_posts`."""

    def prepare(self, url: str, payload: Any) -> Any:
        """What is sent in place of `payload`, which is the caller's and must not be changed."""

    def observe(self, url: str, payload: Any, output: Any) -> None:
        """What was sent, and the decoded answer."""


class HTTPStatusError(RuntimeError):
    """The server answered with an error status that is not worth repeating."""

    def __init__(self, method: str, url: str, status: int, body: str) -> None:
        super().__init__(f"{method} {url} answered {status}: {body[:2000]}")
        self.status, self.body, self.url = status, body, url


def init_http_client(args) -> None:
    """Take the deadline of one request, retries included, from --sglang-router-request-timeout-secs."""
    global _deadline_s
    _deadline_s = float(args.sglang_router_request_timeout_secs)


async def post(
    url: str,
    payload: Any = None,
    max_retries: int = 60,
    headers: dict | None = None,
    deadline_s: float | None = None,
    max_bytes: int | None = None,
) -> Any:
    """POST JSON and return the decoded body (text if it is not JSON).

    Args:
        max_retries: attempts in total; `deadline_s` bounds them together (default: `init_http_client`).
        max_bytes: a longer answer is not read.

    Raises:
        HTTPStatusError: an error status that is not repeated, or a redirection to elsewhere. RuntimeError: budget used up (names the
            last evidence), or an answer that is too long.
    """
    payload = prepared(url, payload)
    output = await _request("POST", url, payload, max_retries, headers, deadline_s, max_bytes)
    observer = _observer.get()
    if observer is not None:
        observer.observe(url, payload, output)
    return output


def prepared(url: str, payload: Any) -> Any:
    """The payload as it is sent from this context."""
    observer = _observer.get()
    return payload if observer is None else observer.prepare(url, payload)


@contextlib.contextmanager
def observed_posts(observer: Observer | None) -> Iterator[None]:
    """Let `observer` prepare and see every `post` made inside, also in tasks started there; None: nobody."""
    token = _observer.set(observer)
    try:
        yield
    finally:
        _observer.reset(token)


async def get(url: str, max_retries: int = 1, headers: dict | None = None, deadline_s: float | None = None) -> Any:
    """GET and return the decoded body; one attempt unless told otherwise."""
    return await _request("GET", url, None, max_retries, headers, deadline_s)


async def _request(
    method: str, url: str, payload, max_retries: int, headers, deadline_s: float | None, max_bytes: int | None = None
) -> Any:
    import aiohttp

    budget_s = _deadline_s if deadline_s is None else deadline_s
    started, last, asked_s = time.monotonic(), "no attempt", 0.0
    for attempt in range(max(1, max_retries)):
        left_s = budget_s - (time.monotonic() - started)
        if left_s <= 0:
            break
        try:
            status, body, asked_s = await _exchange(method, url, payload, headers, left_s, max_bytes)
        except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError, ConnectionError) as error:
            last = f"{type(error).__name__}: {error}"
        except asyncio.TimeoutError:
            last = f"no answer within {budget_s:g} s"
            break
        else:
            if status < 300:
                return _decode(body)
            body = body.decode(errors="replace")
            if status not in RETRIED_STATUS and not (status == 500 and ROUTER_LOST_ENGINE in body):
                raise HTTPStatusError(method, url, status, body)
            last = f"status {status}: {body[:500]}"
        if attempt + 1 < max_retries:
            wait_s, asked_s = max(asked_s, min(MAX_BACKOFF_S, 0.05 * 2**attempt)), 0.0
            await asyncio.sleep(min(wait_s, max(0.0, budget_s - (time.monotonic() - started))))
    elapsed = time.monotonic() - started
    raise RuntimeError(
        f"{method} {url} failed: {attempt + 1} attempts in {elapsed:.1f} s (budget {budget_s:g} s, {max_retries} attempts), "
        f"last: {last}"
    )


async def _exchange(
    method: str, url: str, payload, headers, timeout_s: float, max_bytes: int | None
) -> tuple[int, bytes, float]:
    """(status, body, seconds to wait that the server asks for) of one attempt; redirections on the same server are followed."""
    import aiohttp

    timeout = aiohttp.ClientTimeout(total=timeout_s, sock_connect=CONNECT_TIMEOUT_S)
    data = None
    if payload is not None:
        data, headers = _encode(payload), {"Content-Type": "application/json", **(headers or {})}
    options = {"data": data, "headers": headers, "timeout": timeout, "allow_redirects": False}
    target = url
    for _ in range(MAX_REDIRECTS + 1):
        async with get_session().request(method, target, **options) as response:
            if response.status not in (307, 308):  # these two repeat the request as it was
                return response.status, await _body(response, url, max_bytes), _retry_after(response)
            elsewhere = urllib.parse.urljoin(target, response.headers.get("Location", ""))
        if urllib.parse.urlsplit(elsewhere)[:2] != urllib.parse.urlsplit(url)[:2]:
            break
        target = elsewhere
    raise HTTPStatusError(method, url, response.status, f"not redirected to {elsewhere}")


async def _body(response, url: str, max_bytes: int | None) -> bytes:
    if max_bytes is None:
        return await response.read()
    body = bytearray()
    async for chunk in response.content.iter_any():
        body += chunk
        if len(body) > max_bytes:
            raise RuntimeError(f"{url} answered more than {max_bytes} bytes, beginning with {bytes(body[:80])!r}")
    return bytes(body)


def _retry_after(response) -> float:
    """The seconds of a Retry-After header, up to MAX_RETRY_AFTER_S; 0 without one, or with a date."""
    value = response.headers.get("Retry-After", "")
    return min(float(value), MAX_RETRY_AFTER_S) if value.isdecimal() else 0.0


def _encode(payload: Any) -> bytes:
    import orjson

    try:
        return orjson.dumps(payload)
    except TypeError:  # keys that are no strings, integers beyond 64 bits
        return json.dumps(payload).encode()


def _decode(body: bytes) -> Any:
    import orjson

    try:
        return orjson.loads(body)
    except ValueError:
        text = body.decode(errors="replace")
    if "NaN" not in text and "Infinity" not in text:  # which some servers send, and only Python's parser takes
        return text
    try:
        return json.loads(text)
    except ValueError:
        return text


def get_session():
    """The aiohttp session of the running loop: no proxies, no total timeout, no connection limit."""
    import aiohttp

    loop = asyncio.get_running_loop()
    session = _sessions.get(loop)
    if session is None or session.closed:
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S)
        session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0), timeout=timeout, trust_env=False, read_bufsize=1 << 20
        )
        if not _sessions:
            atexit.register(_close_sessions_at_exit)
        _sessions[loop] = session
    return session


def _close_sessions_at_exit() -> None:
    for loop, session in list(_sessions.items()):
        if loop.is_running():
            asyncio.run_coroutine_threadsafe(session.close(), loop).result(timeout=2)
        elif not loop.is_closed():
            session.detach()


async def close_session() -> None:
    """Close the session of the running loop, if there is one."""
    session = _sessions.pop(asyncio.get_running_loop(), None)
    if session is not None:
        await session.close()


# ---- hosts and ports -----------------------------------------------------------------------------------------------


class HeldPort:
    """A free port that stays bound until `release`, so that no other process takes it meanwhile."""

    def __init__(self, host: str = "127.0.0.1", candidates: range | None = None) -> None:
        self.host = host
        self._socket = _bind_first(host, candidates)
        self.port: int = self._socket.getsockname()[1]

    def release(self) -> int:
        """Let the port go (just before the server binds it) and return it."""
        self._socket.close()
        return self.port

    def __enter__(self) -> HeldPort:
        return self

    def __exit__(self, *exc_info) -> None:
        self._socket.close()


def _bind_first(host: str, candidates: range | None) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    for port in candidates if candidates is not None else (0,):
        sock = socket.socket(family, socket.SOCK_STREAM)
        try:
            sock.bind((host, port))
            return sock
        except OSError:
            sock.close()
    raise RuntimeError(f"no free port on {host} in {candidates}")


def find_free_port(host: str = "127.0.0.1", candidates: range | None = None) -> int:
    """A port that is free now; hold it with `HeldPort` where another process may be choosing too."""
    with HeldPort(host, candidates) as held:
        return held.port


def is_port_available(port: int) -> bool:
    """Whether a server could listen on this port of all addresses."""
    try:
        HeldPort("", range(port, port + 1)).release()
        return True
    except RuntimeError:
        return False


def find_available_port(base_port: int) -> int:
    """The first port from `base_port` on that is free on all addresses, for a server of one's own."""
    return find_free_port("", range(base_port, 65536))


def get_host_info() -> tuple[str, str]:
    """(name, address) of this machine, as others reach it."""
    return socket.gethostname(), get_host_ip()


def is_port_open(host: str, port: int, timeout_s: float = 1.0) -> bool:
    """Whether something accepts connections there."""
    try:
        with socket.create_connection((host, port), timeout=timeout_s):
            return True
    except OSError:
        return False


def get_host_ip() -> str:
    """Address by which other machines reach this one: SLIME_HOST_IP, a UDP probe, the host name, else loopback.

    SLIME_PREFER_IPV6=1 looks for IPv6 addresses only.
    """
    if os.environ.get("SLIME_HOST_IP"):
        return os.environ["SLIME_HOST_IP"]
    v6 = os.environ.get("SLIME_PREFER_IPV6") == "1"
    family, probe = (socket.AF_INET6, "2001:db8::1") if v6 else (socket.AF_INET, "192.0.2.1")
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as sock:
            sock.connect((probe, 9))
            return sock.getsockname()[0]
    except OSError:
        pass
    try:
        return socket.getaddrinfo(socket.gethostname(), None, family)[0][4][0]
    except OSError:
        return "::1" if v6 else "127.0.0.1"


def format_host(host: str) -> str:
    """The host as it stands in a URL: IPv6 addresses in brackets.

    >>> format_host("::1"), format_host("10.0.0.1")
    ('[::1]', '10.0.0.1')
    """
    return f"[{host}]" if ":" in host and not host.startswith("[") else host
