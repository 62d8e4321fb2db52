"""Import path of traces for users' functions; the code is in slime.observability.trace_utils."""

from slime.observability.trace_utils import (
    bind_trace,
    export_trace,
    import_trace,
    trace_event,
    trace_function,
    trace_next_attempt,
    trace_span,
)
