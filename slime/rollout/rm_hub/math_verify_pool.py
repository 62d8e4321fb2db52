"""The `math_verify` reward type: the `math-verify` library in worker processes.

The library parses LaTeX with sympy and stops itself by a signal, so it needs a main thread and can still run away;
each call therefore has a deadline here, and a worker that overran it is killed and replaced. Workers start at the
first use (`python -m slime.rollout.rm_hub.math_verify_pool`, JSON lines over pipes) and end with their parent.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import select
import subprocess
import sys
import threading

logger = logging.getLogger(__name__)

CALL_TIMEOUT_S = 10.0
STARTUP_TIMEOUT_S = 60.0
LIBRARY_TIMEOUT_S = 3


async def math_verify_reward(response: str, label: str, timeout_s: float) -> float:
    """Return 1.0 when the library finds the answers equal, else 0.0 (also when the comparison overruns its time)."""
    if response.strip() == label.strip():
        return 1.0
    return await asyncio.to_thread(_shared_pool().grade, response, label, min(timeout_s, CALL_TIMEOUT_S))


class VerifyPool:
    """A few single-request workers; an overrun costs one worker, never the round."""

    def __init__(self, size: int):
        self._free: list[subprocess.Popen] = []
        self._slots = threading.Semaphore(size)
        self._lock = threading.Lock()

    def grade(self, response: str, label: str, timeout_s: float) -> float:
        """Return 1.0 or 0.0 within `timeout_s` of a free worker."""
        with self._slots:
            worker = self._take()
            verdict = _ask(worker, {"response": response, "label": label}, timeout_s)
            if verdict is None:
                logger.warning("math_verify: no verdict within %.0f s, scored 0 (response %.80r)", timeout_s, response)
                _stop(worker)
                return 0.0
            with self._lock:
                self._free.append(worker)
            return float(verdict)

    def close(self) -> None:
        """Stop the idle workers."""
        with self._lock:
            workers, self._free = self._free, []
        for worker in workers:
            _stop(worker)

    def _take(self) -> subprocess.Popen:
        with self._lock:
            if self._free:
                return self._free.pop()
        command = [sys.executable, "-m", "slime.rollout.rm_hub.math_verify_pool"]
        worker = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, bufsize=1
        )
        if _read_line(worker, STARTUP_TIMEOUT_S) is None:
            _stop(worker)
            raise RuntimeError(
                f"the math-verify worker ({' '.join(command)}) was not ready within {STARTUP_TIMEOUT_S:.0f} s, exit code "
                f"{worker.returncode}; is math-verify installed?"
            )
        return worker


def _ask(worker: subprocess.Popen, request: dict, timeout_s: float) -> bool | None:
    try:
        worker.stdin.write(json.dumps(request) + "\n")
        worker.stdin.flush()
    except OSError:
        return None
    line = _read_line(worker, timeout_s)
    return None if line is None else json.loads(line)


def _read_line(worker: subprocess.Popen, timeout_s: float) -> str | None:
    """Return the worker's next line, or None after the deadline or at its end."""
    ready, _, _ = select.select([worker.stdout], [], [], timeout_s)
    return (worker.stdout.readline() or None) if ready else None


def _stop(worker: subprocess.Popen) -> None:
    worker.kill()
    worker.wait(timeout=10)
    worker.stdin.close()
    worker.stdout.close()


_pools: list[VerifyPool] = []
_pools_lock = threading.Lock()


def _shared_pool() -> VerifyPool:
    with _pools_lock:
        if not _pools:
            _pools.append(VerifyPool(num_workers()))
        return _pools[0]


def num_workers() -> int:
    """How many answers are verified at the same time."""
    return max(1, min(4, (os.cpu_count() or 1) // 2))


def verify_answer(response: str, label: str) -> bool:
    """Return the library's verdict; what it cannot parse is wrong."""
    from math_verify import parse, verify

    gold = parse(label if "\\boxed" in label or "$" in label else f"${label}$", parsing_timeout=LIBRARY_TIMEOUT_S)
    answer = parse(response, parsing_timeout=LIBRARY_TIMEOUT_S)
    return bool(verify(gold, answer, timeout_seconds=LIBRARY_TIMEOUT_S))


def _serve() -> None:
    import math_verify  # noqa: F401  (load before saying ready)

    print("ready", flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        try:
            verdict = verify_answer(request["response"], request["label"])
        except Exception:
            verdict = False
        print(json.dumps(verdict), flush=True)


if __name__ == "__main__":
    _serve()
