"""What an engine's `meta_info` says about a request, as span attributes and child spans.

Invariants: only keys that the engine sent appear; durations are seconds. The children of disaggregated serving lie one
after another from the start of their span, since the engine reports lengths of phases, not moments.
It does not know samples or carriers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

CHILDREN_KEY = "_trace_children"

_COPIED = ("prompt_tokens", "completion_tokens", "cached_tokens", "queue_time", "e2e_latency", "decode_throughput")
_SUMMARY = ("pd_transfer_speed_gb_s", "pd_transfer_total_mb", "pd_prefill_retry_count")
_PHASES = {
    "prefill": ("bootstrap_queue", "bootstrap", "alloc_wait", "forward", "transfer_queue"),
    "decode": ("prealloc", "bootstrap", "alloc_wait", "transfer", "forward"),
}
_DURATIONS = {side: [f"pd_{side}_{phase}_duration" for phase in phases] for side, phases in _PHASES.items()}
_DISAGGREGATED = frozenset(_SUMMARY).union(*_DURATIONS.values())


def build_sglang_meta_trace_attrs(meta_info: Mapping | None) -> dict:
    """Return the attributes for the end of a generation span, its child spans under a private key.

    Example: `{"completion_tokens": 5, "finish_reason": {"type": "stop"}, "id": "r1"}` gives
    `{"completion_tokens": 5, "finish_reason": "stop", "sglang_request_id": "r1"}`.
    """
    if not isinstance(meta_info, Mapping):
        return {}
    attrs = {key: meta_info[key] for key in _COPIED if meta_info.get(key) is not None}
    reason = meta_info.get("finish_reason")
    reason = reason.get("type") if isinstance(reason, Mapping) else reason
    if reason is not None:
        attrs["finish_reason"] = reason
    if meta_info.get("id") is not None:
        attrs["sglang_request_id"] = meta_info["id"]
    children = _children(meta_info)
    if children:
        attrs[CHILDREN_KEY] = children
        for child in children:
            attrs.update(child["attrs"])
    return attrs


def emit_children(emit: Callable, parent_span_id: str, started_at: float, children: list[dict]) -> None:
    """Write children, whose offsets count from `started_at`, through `emit(kind, name, ts=, attrs=, **ids)`."""
    for number, child in enumerate(children):
        start = started_at + child["start"]
        if child["kind"] == "event":
            emit("event", child["name"], ts=start, attrs=child["attrs"], parent_span_id=parent_span_id)
            continue
        ids = {"span_id": f"{parent_span_id}.{number}"}
        emit("span_start", child["name"], ts=start, attrs=child["attrs"], parent_span_id=parent_span_id, **ids)
        emit("span_end", child["name"], ts=started_at + child["end"], **ids)


def _children(meta_info: Mapping) -> list[dict]:
    if _DISAGGREGATED.isdisjoint(meta_info):
        return []
    children, offset = [], 0.0
    for side, keys in _DURATIONS.items():
        durations = {key: float(meta_info[key]) for key in keys if isinstance(meta_info.get(key), (int, float))}
        if durations:
            end = offset + sum(durations.values())
            children.append(
                {"kind": "span", "name": f"sglang_pd_{side}", "start": offset, "end": end, "attrs": durations}
            )
            offset = end
    summary = {key: meta_info[key] for key in _SUMMARY if meta_info.get(key) is not None}
    if summary:
        children.append({"kind": "event", "name": "sglang_pd_summary", "start": offset, "attrs": summary})
    return children
