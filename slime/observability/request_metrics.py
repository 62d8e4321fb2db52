"""Metrics of single engine requests, read from the generation spans on `sample.trace`.

Invariants: only finite numbers count; a sample without a trace, or with a damaged one, contributes nothing.
It does not know how spans are recorded beyond the event format of trace_utils.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable

from slime.observability.metric_utils import describe

GENERATION_SPANS = frozenset({"sglang_generate", "sglang_generate_stream"})

_PREFILL_PHASES = ("bootstrap_queue", "bootstrap", "alloc_wait", "forward", "transfer_queue")
_DECODE_PHASES = ("prealloc", "bootstrap", "alloc_wait", "transfer", "forward")
_ATTR_TO_METRIC = {
    "e2e_latency": "request/e2e_latency",
    "queue_time": "request/queue_time",
    "decode_throughput": "decode/throughput",
    "pd_transfer_speed_gb_s": "prefill/transfer_speed_gb_s",
    "pd_transfer_total_mb": "prefill/transfer_total_mb",
    "pd_prefill_retry_count": "prefill/retry_count",
    **{f"pd_prefill_{phase}_duration": f"prefill/{phase}_duration" for phase in _PREFILL_PHASES},
    **{f"pd_decode_{phase}_duration": f"decode/{phase}_duration" for phase in _DECODE_PHASES},
}


def request_metrics(samples: Iterable) -> dict[str, float]:
    """Return mean, median, max and min of each request attribute, and how many requests finished and carried numbers."""
    values: dict[str, list[float]] = defaultdict(list)
    num_requests = num_profiled = 0
    for attrs in _finished_requests(samples):
        num_requests += 1
        numbers = {_ATTR_TO_METRIC[attr]: x for attr, x in attrs.items() if attr in _ATTR_TO_METRIC and _is_finite(x)}
        num_profiled += bool(numbers)
        for name, number in numbers.items():
            values[name].append(float(number))
    if num_requests == 0:
        return {}
    metrics: dict[str, float] = {"request/count": num_requests, "request/profiled_count": num_profiled}
    for name, numbers in values.items():
        metrics |= describe(name, numbers)
    return metrics


def _finished_requests(samples: Iterable) -> Iterable[dict]:
    """Yield the end attributes of every closed generation span, joined with its own start attributes."""
    seen = set()
    for sample in samples:
        trace = getattr(sample, "trace", None)
        if not isinstance(trace, dict):
            continue
        starts = {}
        for event in trace.get("events", ()):
            if event.get("name") not in GENERATION_SPANS:
                continue
            span_id = event.get("span_id")
            if event.get("type") == "span_start":
                starts[span_id] = event.get("attrs") or {}
            elif event.get("type") == "span_end" and span_id not in seen:
                seen.add(span_id)  # siblings of one execution carry copies of the same trace
                yield {**starts.get(span_id, {}), **(event.get("attrs") or {})}


def _is_finite(value) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
