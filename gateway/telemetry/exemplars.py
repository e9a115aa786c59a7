"""The trace of the request at hand, for exemplars: observations of a histogram that name the trace they come from."""

import re
from contextvars import ContextVar
from typing import NamedTuple

_TRACEPARENT = re.compile(r"[0-9a-f]{2}-([0-9a-f]{32})-([0-9a-f]{16})-[0-9a-f]([0-9a-f])(-.*)?", re.ASCII)
_NO_TRACE = "0" * 32


class TraceSpan(NamedTuple):
    """A span of a trace, by their ids in hexadecimal digits."""

    trace_id: str
    span_id: str


current_span: ContextVar[TraceSpan | None] = ContextVar("current_span", default=None)
"""The span that this task's request belongs to, of a sampled trace; None for none."""


def sampled_span(traceparent: str) -> TraceSpan | None:
    """Return the span of a W3C `traceparent` whose trace is sampled, else None: a trace that nobody keeps leads
    nowhere."""
    match = _TRACEPARENT.fullmatch(traceparent.strip())
    if match is None or traceparent.startswith("ff") or match[1] == _NO_TRACE or not int(match[3], 16) & 1:
        return None
    return TraceSpan(match[1], match[2])
