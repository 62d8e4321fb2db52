"""Counters of the engine and their Prometheus text, under SGLang's metric names.

Written by the engine thread only; readers may see a value that is one step old.
"""

from __future__ import annotations

import time
from collections import deque

from slime.engine.requests import Request

WINDOW_S = 10.0


class Counters:
    """Totals since start and the generation throughput of the last ten seconds."""

    def __init__(self) -> None:
        self.prompt_tokens = 0
        self.generation_tokens = 0
        self.cached_tokens = 0
        self.finished: dict[str, int] = {"stop": 0, "length": 0, "abort": 0}
        self.latency_s = 0.0
        self.queue_s = 0.0
        self._window: deque[list[float]] = deque()  # [second, tokens]

    def note_tokens(self, count: int) -> None:
        self.generation_tokens += count
        second = int(time.monotonic())
        if self._window and self._window[-1][0] == second:
            self._window[-1][1] += count
        else:
            self._window.append([second, count])
            while self._window[0][0] < second - WINDOW_S:
                self._window.popleft()

    def note_finished(self, request: Request) -> None:
        self.finished[request.finish_reason["type"]] += 1
        self.latency_s += request.finished_at - request.received_at
        self.queue_s += (request.started_at or request.finished_at) - request.received_at
        self.cached_tokens += request.cached_tokens

    def cache_hit_rate(self) -> float:
        """Return the share of prompt tokens that were not read since start."""
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else 0.0

    def throughput(self) -> float:
        """Return generated tokens per second over the window."""
        now = time.monotonic()
        return sum(count for second, count in list(self._window) if second >= now - WINDOW_S) / WINDOW_S


def prometheus_text(counters: Counters, gauges: dict[str, float], model_name: str) -> str:
    """Return the Prometheus exposition of counters and gauges (name without prefix -> value)."""
    label = '{{model_name="{}"}}'.format(model_name.replace("\\", "\\\\").replace('"', '\\"'))
    num_finished = sum(counters.finished.values())
    totals = {
        "prompt_tokens_total": counters.prompt_tokens,
        "generation_tokens_total": counters.generation_tokens,
        "cached_tokens_total": counters.cached_tokens,
        "num_requests_total": num_finished,
        "num_aborted_requests_total": counters.finished["abort"],
    }
    lines = []
    for name, value in totals.items():
        lines += [f"# TYPE sglang:{name} counter", f"sglang:{name}{label} {float(value)}"]
    for name, value in {**gauges, "gen_throughput": counters.throughput()}.items():
        lines += [f"# TYPE sglang:{name} gauge", f"sglang:{name}{label} {float(value)}"]
    for name, total in (("e2e_request_latency_seconds", counters.latency_s), ("queue_time_seconds", counters.queue_s)):
        lines += [f"# TYPE sglang:{name} summary", f"sglang:{name}_sum{label} {total}"]
        lines.append(f"sglang:{name}_count{label} {num_finished}")
    return "\n".join(lines) + "\n"
