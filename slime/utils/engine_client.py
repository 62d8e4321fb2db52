"""Synchronous client of one engine's control endpoints (the embedded engine or SGLang): one method per endpoint.

Invariants: proxies of the environment are not used; every call has a deadline; a 4xx answer is never sent again, and raises with
the engine's own words; only a refused connection is retried (nothing was sent then). An engine that answers 200 with
`success: false` counts as failed. Does not generate for training (that goes through the router) and knows no Ray.
"""

from __future__ import annotations

import http.client
import time
from collections.abc import Callable
from typing import Any

from slime.utils.kept_connections import KeptConnections, Reply

CONNECT_RETRY_PAUSE_S = 0.1
POLL_S = 0.1


class EngineError(RuntimeError):
    """An engine refused or failed a call. `status` is the HTTP status, None when there was no answer."""

    def __init__(self, message: str, status: int | None = None):
        super().__init__(message)
        self.status = status


class EngineClient:
    """Control calls to the engine at `base_url`. Usable from several threads; `close` ends its connections."""

    def __init__(self, base_url: str, timeout_s: float = 60.0, connect_retries: int = 3):
        self.base_url = base_url.rstrip("/")
        self._connect_retries = connect_retries
        self._timeout_s = timeout_s
        self._http = KeptConnections(self.base_url)

    def close(self) -> None:
        self._http.close()

    def __enter__(self) -> EngineClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---- state ----

    def is_healthy(self, timeout_s: float | None = None) -> bool:
        """Return whether /health answers 200; no answer counts as no."""
        try:
            return self._send("GET", "/health", None, timeout_s, connect_retries=0).status_code == 200
        except EngineError:
            return False

    def model_info(self) -> dict[str, Any]:
        return self._with_fallback("/model_info", "/get_model_info")

    def server_info(self) -> dict[str, Any]:
        return self._with_fallback("/server_info", "/get_server_info")

    def weight_version(self) -> str:
        """Return the version of the weights being served (older and newer servers report it at different places)."""
        try:
            return str(self._request("GET", "/get_weight_version").json()["weight_version"])
        except EngineError as error:
            if error.status != 404:
                raise
        return str(self.model_info()["weight_version"])

    def loads(self) -> list[dict[str, Any]]:
        """Return the load entries of the engine, one per data-parallel rank."""
        answer = self._request("GET", "/v1/loads?include=core").json()
        return answer["loads"] if isinstance(answer, dict) else answer

    def num_requests(self) -> int:
        """Return how many requests run or wait on the engine."""
        return count_requests(self.loads())

    def wait_ready(self, deadline_s: float, is_alive: Callable[[], bool] = lambda: True) -> None:
        """Wait until the engine generates.

        Raises: EngineError when `is_alive` turns false (the process ended) or the deadline passes; both say what was
        seen last.
        """
        start, last = time.monotonic(), "nothing tried"
        while True:
            left = deadline_s - (time.monotonic() - start)
            if not is_alive():
                raise EngineError(f"engine {self.base_url}: its process ended before it was ready; last: {last}")
            if left <= 0:
                raise EngineError(f"engine {self.base_url}: not ready after {deadline_s:g} s; last: {last}")
            try:
                response = self._send("GET", "/health_generate", None, min(left, 20.0), connect_retries=0)
                if response.status_code == 200:
                    return
                last = f"{response.status_code} {response.text[:300]}"
            except EngineError as error:
                last = str(error)
            time.sleep(min(POLL_S, max(left, 0.0)))

    # ---- requests ----

    def generate(self, body: dict[str, Any], timeout_s: float | None = None) -> Any:
        """POST /generate and return the reply (for checks and tools)."""
        return self._request("POST", "/generate", body, timeout_s).json()

    def abort(self, rid: str | None = None) -> None:
        """End the request `rid`, or all when None; their callers get what was generated."""
        self._request("POST", "/abort_request", {"abort_all": True} if rid is None else {"rid": rid})

    def pause(self, mode: str = "abort") -> None:
        """Hold generation: running requests end (abort), are queued again (retract) or keep their place (in_place)."""
        self._request("POST", "/pause_generation", {"mode": mode})

    def continue_generation(self, timeout_s: float | None = None) -> None:
        self._request("POST", "/continue_generation", {}, timeout_s)

    def flush_cache(self, deadline_s: float = 60.0) -> None:
        """Drop the prefix cache, waiting for running requests to end.

        Raises: EngineError when requests still run at the deadline, or on any other refusal.
        """
        start = time.monotonic()
        while True:
            response = self._send("GET", "/flush_cache", None, None, self._connect_retries)
            if response.status_code == 200:
                return
            if response.status_code != 400:
                raise _error("GET", self.base_url + "/flush_cache", response)
            if time.monotonic() - start >= deadline_s:
                raise EngineError(
                    f"engine {self.base_url}: cache not flushed after {deadline_s:g} s, requests still run; "
                    f"last: {response.text.strip()[:300]}",
                    400,
                )
            time.sleep(POLL_S)

    # ---- weights ----

    def begin_weight_update(self) -> None:
        """Open an update; servers that do not know the call need none."""
        self._request_if_known("/begin_weight_update")

    def end_weight_update(self, timeout_s: float | None = None) -> None:
        """Close an update; servers that do not know the call need none."""
        self._request_if_known("/end_weight_update", timeout_s)

    def init_weights_update_group(
        self,
        master_address: str,
        master_port: int,
        rank_offset: int,
        world_size: int,
        group_name: str,
        backend: str,
        timeout_s: float | None = None,
    ) -> None:
        """Make the engine join a group; returns when all members are there, so rank 0 must join meanwhile."""
        body = {
            "master_address": master_address,
            "master_port": master_port,
            "rank_offset": rank_offset,
            "world_size": world_size,
            "group_name": group_name,
            "backend": backend,
        }
        self._request_success("/init_weights_update_group", body, timeout_s)

    def destroy_weights_update_group(self, group_name: str, timeout_s: float | None = None) -> None:
        self._request_success("/destroy_weights_update_group", {"group_name": group_name}, timeout_s)

    def update_weights_from_distributed(
        self,
        names: list[str],
        dtypes: list[str],
        shapes: list[list[int]],
        group_name: str,
        flush_cache: bool = False,
        weight_version: str | None = None,
        timeout_s: float | None = None,
    ) -> None:
        """Announce broadcasts, one per name in this order; returns when the engine has applied them.

        Args: dtypes without the `torch.` prefix, e.g. bfloat16.
        """
        body: dict[str, Any] = {
            "names": names,
            "dtypes": dtypes,
            "shapes": [list(shape) for shape in shapes],
            "group_name": group_name,
            "flush_cache": flush_cache,
        }
        if weight_version is not None:
            body["weight_version"] = weight_version
        self._request_success("/update_weights_from_distributed", body, timeout_s)

    def update_weights_from_tensor(
        self,
        serialized_named_tensors: list[str],
        load_format: str | None = None,
        flush_cache: bool = False,
        weight_version: str | None = None,
        timeout_s: float | None = None,
    ) -> None:
        """Hand over tensors in memory that the engine's machine shares (`slime.utils.tensor_wire`), one text per rank."""
        body = {
            "serialized_named_tensors": serialized_named_tensors,
            "load_format": load_format,
            "flush_cache": flush_cache,
            "weight_version": weight_version,
        }
        body = {key: value for key, value in body.items() if value is not None}
        self._request_success("/update_weights_from_tensor", body, timeout_s)

    def update_weights_from_disk(
        self,
        model_path: str,
        weight_version: str | None = None,
        load_format: str | None = None,
        timeout_s: float | None = None,
    ) -> None:
        """Make the engine read a Hugging Face folder that it can see."""
        body = {"model_path": model_path, "weight_version": weight_version, "load_format": load_format}
        body = {key: value for key, value in body.items() if value is not None}
        self._request_success("/update_weights_from_disk", body, timeout_s)

    def load_lora_adapter(self, name: str, path: str, timeout_s: float | None = None) -> None:
        """Make the engine serve a PEFT folder that it can see, beside the base model."""
        self._request_success("/load_lora_adapter", {"lora_name": name, "lora_path": path}, timeout_s)

    def load_lora_adapter_from_tensors(
        self,
        name: str,
        config: dict[str, Any],
        serialized_named_tensors: list[str],
        load_format: str | None = None,
        timeout_s: float | None = None,
    ) -> None:
        """Hand over an adapter in memory that the engine's machine shares (`slime.utils.tensor_wire`), one text per rank."""
        body = {"lora_name": name, "config_dict": config, "serialized_named_tensors": serialized_named_tensors}
        if load_format is not None:
            body["load_format"] = load_format
        self._request_success("/load_lora_adapter_from_tensors", body, timeout_s)

    def unload_lora_adapter(self, name: str, timeout_s: float | None = None) -> None:
        """Forget an adapter, once its requests have ended."""
        self._request_success("/unload_lora_adapter", {"lora_name": name}, timeout_s)

    def update_weight_version(self, new_version: str, abort_all_requests: bool = False) -> None:
        body = {"new_version": new_version, "abort_all_requests": abort_all_requests}
        self._request_success("/update_weight_version", body)

    def weights_checker(self, action: str, timeout_s: float | None = None) -> dict[str, Any]:
        """Run checksum (reply holds `checksums`), snapshot, reset_tensors or compare (raises when weights differ)."""
        return self._request_success("/weights_checker", {"action": action}, timeout_s)

    def release_memory_occupation(self, tags: list[str] | None = None) -> None:
        self._request("POST", "/release_memory_occupation", {} if tags is None else {"tags": tags})

    def resume_memory_occupation(self, tags: list[str] | None = None) -> None:
        self._request("POST", "/resume_memory_occupation", {} if tags is None else {"tags": tags})

    # ---- transport ----

    def _request_success(self, path: str, body: dict[str, Any], timeout_s: float | None = None) -> dict[str, Any]:
        response = self._request("POST", path, body, timeout_s)
        answer = response.json()
        if not answer.get("success", True):
            raise _error("POST", self.base_url + path, response)
        return answer

    def _request_if_known(self, path: str, timeout_s: float | None = None) -> None:
        try:
            self._request("POST", path, {}, timeout_s)
        except EngineError as error:
            if error.status != 404:
                raise

    def _with_fallback(self, path: str, older_path: str) -> dict[str, Any]:
        try:
            return self._request("GET", path).json()
        except EngineError as error:
            if error.status != 404:
                raise
        return self._request("GET", older_path).json()

    def _request(
        self, method: str, path: str, body: dict[str, Any] | None = None, timeout_s: float | None = None
    ) -> Reply:
        response = self._send(method, path, body, timeout_s, self._connect_retries)
        if response.status_code != 200:
            raise _error(method, self.base_url + path, response)
        return response

    def _send(
        self, method: str, path: str, body: dict[str, Any] | None, timeout_s: float | None, connect_retries: int
    ) -> Reply:
        timeout_s = self._timeout_s if timeout_s is None else timeout_s
        for attempt in range(connect_retries + 1):
            try:
                return self._http.request(method, path, body, timeout_s)
            except ConnectionRefusedError as error:
                if attempt == connect_retries:
                    raise EngineError(
                        f"{method} {self.base_url}{path}: no connection after {attempt + 1} attempt(s): {error}"
                    ) from error
                time.sleep(CONNECT_RETRY_PAUSE_S)
            except TimeoutError as error:
                raise EngineError(f"{method} {self.base_url}{path}: no answer within {timeout_s:g} s") from error
            except (OSError, http.client.HTTPException) as error:
                raise EngineError(f"{method} {self.base_url}{path}: {type(error).__name__}: {error}") from error
        raise AssertionError("unreachable: the last attempt returns or raises")


def _error(method: str, url: str, response: Reply) -> EngineError:
    return EngineError(f"{method} {url} answered {response.status_code}: {_reason(response)}", response.status_code)


def _reason(response: Reply) -> str:
    """Return the message of a JSON error, else the text."""
    try:
        answer = response.json()
        message = answer.get("message") or answer.get("error_message")
    except (ValueError, AttributeError):
        message = None
    return (message if isinstance(message, str) and message else response.text.strip())[:1000]


def count_requests(load: Any) -> int:
    """Requests an engine holds, from any of the shapes of `/v1/loads`.

    >>> count_requests({"loads": [{"num_running_reqs": 2, "num_waiting_reqs": 1}]})
    3
    """
    if isinstance(load, list):
        return sum(count_requests(item) for item in load)
    if not isinstance(load, dict):
        return 0
    if isinstance(load.get("loads"), (list, dict)):
        return count_requests(load["loads"])
    for key in ("num_reqs", "num_total_reqs", "total_reqs"):
        if load.get(key) is not None:
            return int(load[key])
    for prefix in ("num", "total"):
        running, waiting = load.get(f"{prefix}_running_reqs"), load.get(f"{prefix}_waiting_reqs")
        if running is not None or waiting is not None:
            return int(running or 0) + int(waiting or 0)
    return 0
