"""Spans and events on `sample.trace`: what happened to a sample, when, and under which parent.

Invariants: the list of events only grows; every public function swallows its own errors (a debug log), so tracing never
breaks a rollout, while errors of the traced block pass through untouched. The carrier is plain data and travels with
`Sample.to_dict`. It does not know who reads a trace.

A target is a Sample, a TraceHandle, or a (nested) list of them. Example of an event:
`{"type": "span_end", "name": "reward_model", "ts": 1700000000.5, "trace_id": "9f…", "sample_id": 3, "group_id": 0,
"attempt": 0, "span_id": "ab…", "parent_span_id": None, "attrs": {"error_type": "TimeoutError"}}`.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import inspect
import logging
import os
import random
import time
from collections.abc import Callable
from dataclasses import dataclass

from slime.observability.trace_meta import CHILDREN_KEY, build_sglang_meta_trace_attrs, emit_children

__all__ = [
    "TraceHandle",
    "TraceSpan",
    "bind_trace",
    "bind_trace_carrier",
    "build_sglang_meta_trace_attrs",
    "export_trace",
    "import_trace",
    "trace_event",
    "trace_function",
    "trace_next_attempt",
    "trace_span",
]

logger = logging.getLogger(__name__)

VERSION = 1
# Innermost open span of each trace in this task: trace id -> span id. Never changed in place: other tasks hold it too.
_innermost: contextvars.ContextVar[dict[str, str]] = contextvars.ContextVar("slime_trace_innermost", default={})  # noqa: B039
_warned_functions: set[str] = set()
_ids = random.Random(os.urandom(16))
os.register_at_fork(after_in_child=lambda: _ids.seed(os.urandom(16)))


@dataclass
class TraceHandle:
    """A carrier plus the span that new spans hang below (None: the innermost open span of this task)."""

    carrier: dict
    parent_span_id: str | None = None


class TraceSpan:
    """Attributes of one span; those set while it is open go on its end event, later ones are added to that event."""

    def __init__(self):
        self.attrs: dict = {}

    def set(self, key: str, value) -> None:
        """Set one attribute."""
        self.attrs[key] = value

    def update(self, attrs: dict | None = None, **more) -> None:
        """Set several attributes."""
        self.attrs.update(attrs or {}, **more)

    set_attr = set
    update_attrs = update


def _never_raises(fallback=None):
    """Make a function answer `fallback` and leave a debug line where it would raise."""

    def decorate(function):
        @functools.wraps(function)
        def wrapper(*args, **kwargs):
            try:
                return function(*args, **kwargs)
            except Exception:
                logger.debug("tracing: %s failed", function.__name__, exc_info=True)
                return fallback

        return wrapper

    return decorate


@_never_raises()
def bind_trace(sample) -> TraceHandle | None:
    """Return the handle of a sample's trace, giving the sample a new trace when it has none."""
    return TraceHandle(_carrier_of(sample))


@_never_raises()
def bind_trace_carrier(carrier: dict, parent_span_id: str | None = None) -> TraceHandle | None:
    """Return a handle on a carrier that lives outside a sample."""
    for key, value in _new_carrier(None, None).items():
        carrier.setdefault(key, value)
    return TraceHandle(carrier, parent_span_id)


@_never_raises()
def export_trace(target) -> dict | None:
    """Return what another process needs to go on with this trace: ids, attempt and the current parent, no events."""
    carrier, parent = _carriers(target)[0]
    payload = {key: carrier[key] for key in ("version", "trace_id", "sample_id", "group_id", "attempt")}
    return payload | {"parent_span_id": _innermost.get().get(carrier["trace_id"], parent)}


@_never_raises()
def import_trace(payload: dict | None) -> TraceHandle | None:
    """Return a handle on an empty carrier that continues an exported trace."""
    if not payload:
        return None
    carrier = {key: value for key, value in payload.items() if key != "parent_span_id"}
    return bind_trace_carrier(carrier, payload.get("parent_span_id"))


@_never_raises()
def trace_event(target, name: str, attrs: dict | None = None) -> None:
    """Record a moment."""
    for carrier, parent in _carriers(target):
        parent = _innermost.get().get(carrier["trace_id"], parent)
        _emit(carrier, "event", name, parent_span_id=parent, attrs=attrs)


@_never_raises()
def trace_next_attempt(target) -> None:
    """Count a new attempt at the sample; events from here on carry its number."""
    for carrier, _ in _carriers(target):
        carrier["attempt"] += 1
    trace_event(target, "attempt_start")


class trace_span(contextlib.ContextDecorator):  # noqa: N801 - public name of a function-like context manager
    """Record the block as a span on every sample of `target`; spans opened inside become its children."""

    def __init__(self, target, name: str, *, attrs: dict | None = None, record_error: bool = True):
        self._target, self._name, self._attrs, self._record_error = target, name, attrs, record_error

    def _recreate_cm(self) -> trace_span:
        return type(self)(self._target, self._name, attrs=self._attrs, record_error=self._record_error)

    def __enter__(self) -> TraceSpan:
        self._span = TraceSpan()
        self._opened = _open(self._target, self._name, self._attrs) or []
        innermost = _innermost.get().copy()
        for carrier, span_id, _ in self._opened:
            innermost[carrier["trace_id"]] = span_id
        self._token = _innermost.set(innermost)
        return self._span

    def __exit__(self, error_type, error, traceback) -> None:
        if error is not None and self._record_error:
            self._span.update(error_type=error_type.__name__, error_message=str(error))
        try:
            _innermost.reset(self._token)
        except ValueError:  # a generator closed from another context has nothing to restore there
            pass
        _close(self._opened, self._name, self._span)


def trace_function(
    name: str, *, target: str | None = None, target_getter: Callable | None = None, attrs_getter: Callable | None = None
):
    """Decorate a sync or async function so that each call is a span.

    Args:
        target: name of the parameter that holds the traced sample(s).
        target_getter: function of the call's arguments that returns them instead.
        attrs_getter: function of the call's arguments that returns the span's attributes.

    Without a target the first argument that is a sample, or a list of samples, is taken; that warns once per function.
    """

    def decorate(function):
        def open_span(args, kwargs):
            found = _find_target(function, target, target_getter, args, kwargs)
            attrs = _call(attrs_getter, args, kwargs) if attrs_getter else None
            return trace_span(found if found is not None else [], name, attrs=attrs)

        if inspect.iscoroutinefunction(function):

            @functools.wraps(function)
            async def wrapper(*args, **kwargs):
                with open_span(args, kwargs):
                    return await function(*args, **kwargs)

        else:

            @functools.wraps(function)
            def wrapper(*args, **kwargs):
                with open_span(args, kwargs):
                    return function(*args, **kwargs)

        return wrapper

    return decorate


def _new_id() -> str:
    """Return 16 hex digits; cheaper than a UUID, and independent of the random state that users seed."""
    return f"{_ids.getrandbits(64):016x}"


def _new_carrier(sample_id, group_id) -> dict:
    return {
        "version": VERSION,
        "trace_id": _new_id() + _new_id(),
        "sample_id": sample_id,
        "group_id": group_id,
        "attempt": 0,
        "events": [],
    }


def _carrier_of(sample) -> dict:
    """Return the sample's carrier, a new one when it has none, with the numbers that the sample has now."""
    carrier = getattr(sample, "trace", None)
    if not isinstance(carrier, dict) or "events" not in carrier:
        carrier = sample.trace = _new_carrier(sample.index, sample.group_index)
    carrier["sample_id"], carrier["group_id"] = sample.index, sample.group_index
    return carrier


def _carriers(target) -> list[tuple[dict, str | None]]:
    """Return (carrier, parent it came with) of every sample and handle in the target; what cannot be traced is left out."""
    if target is None:
        return []
    if isinstance(target, TraceHandle):
        return [(target.carrier, target.parent_span_id)]
    if isinstance(target, (list, tuple)):
        return [pair for item in target for pair in _carriers(item)]
    try:
        return [(_carrier_of(target), None)]
    except Exception:
        logger.debug("tracing: a %s cannot be traced", type(target).__name__, exc_info=True)
        return []


def _emit(
    carrier: dict,
    kind: str,
    name: str,
    *,
    ts: float | None = None,
    attrs: dict | None = None,
    span_id: str | None = None,
    parent_span_id: str | None = None,
) -> dict:
    event = {
        "type": kind,
        "name": name,
        "ts": time.time() if ts is None else ts,
        "trace_id": carrier["trace_id"],
        "sample_id": carrier["sample_id"],
        "group_id": carrier["group_id"],
        "attempt": carrier["attempt"],
    }
    if span_id is not None:
        event["span_id"] = span_id
    if parent_span_id is not None:
        event["parent_span_id"] = parent_span_id
    if attrs:
        event["attrs"] = dict(attrs)
    carrier["events"].append(event)
    return event


@_never_raises()
def _open(target, name: str, attrs: dict | None) -> list[tuple[dict, str, float]]:
    """Begin a span on every carrier of the target. Returns (carrier, span id, start) of each."""
    opened, now, innermost = [], time.time(), _innermost.get()
    for carrier, parent in _carriers(target):
        span_id, parent = _new_id(), innermost.get(carrier["trace_id"], parent)
        _emit(carrier, "span_start", name, ts=now, attrs=attrs, span_id=span_id, parent_span_id=parent)
        opened.append((carrier, span_id, now))
    return opened


@_never_raises()
def _close(opened: list[tuple[dict, str, float]], name: str, span: TraceSpan) -> None:
    children, now = span.attrs.pop(CHILDREN_KEY, None), time.time()
    for carrier, span_id, started_at in opened:
        if children:
            emit_children(functools.partial(_emit, carrier), span_id, started_at, children)
        event = _emit(carrier, "span_end", name, ts=now, span_id=span_id)
        event["attrs"] = span.attrs  # shared, so that attributes set after the close still arrive


@_never_raises()
def _find_target(function, target, target_getter, args, kwargs):
    if target_getter is not None:
        return target_getter(*args, **kwargs)
    bound = inspect.signature(function).bind(*args, **kwargs).arguments
    if target is not None:
        return bound.get(target)
    if function.__qualname__ not in _warned_functions:
        _warned_functions.add(function.__qualname__)
        logger.warning("trace_function on %s has no target: taking its first sample argument", function.__qualname__)
    return next((value for value in bound.values() if _is_target(value)), None)


@_never_raises()
def _call(function, args, kwargs):
    return function(*args, **kwargs)


def _is_target(value) -> bool:
    if isinstance(value, (list, tuple)):
        return bool(value) and all(_is_target(item) for item in value)
    return isinstance(value, TraceHandle) or (hasattr(value, "group_index") and hasattr(value, "index"))
