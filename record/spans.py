"""Spans: where the time of a request goes, as plain numbers that whoever works for it notes.

The task of a request and its child tasks find the innermost open span in `current_span`; it is None where nobody
records. What becomes of a finished recording is the matter of who began it: OpenTelemetry, a timeline, or both.
"""

import re
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from random import getrandbits
from time import perf_counter_ns, time_ns
from typing import NamedTuple

Attribute = str | bool | int | float | tuple[str, ...]
Attributes = dict[str, Attribute]
MAX_SPANS = 512
"""Most spans of a recording. Those after them are counted and not kept."""
_TRACEPARENT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?", re.ASCII)
_SAMPLED = 1


class RemoteParent(NamedTuple):
    """The span of another process that a request was sent by: the W3C's `traceparent` and `tracestate`."""

    trace_id: int
    span_id: int
    is_sampled: bool
    state: str = ""


remote_parent: ContextVar[RemoteParent | None] = ContextVar("remote_parent", default=None)
"""The span that sent the request, or the stream of requests, that this task works for; None for none."""


def parse_traceparent(text: str, state: str = "") -> RemoteParent | None:
    """Return the parent that a header `traceparent` names; None for one that is not valid, as the W3C asks."""
    match = _TRACEPARENT.fullmatch(text.strip())
    if match is None or match[1] == "ff" or (match[1] == "00" and match[5]):
        return None
    trace_id, span_id = int(match[2], 16), int(match[3], 16)
    if not trace_id or not span_id:
        return None
    return RemoteParent(trace_id, span_id, bool(int(match[4], 16) & _SAMPLED), state)


def format_traceparent(trace_id: int, span_id: int, *, is_sampled: bool) -> str:
    """Return the header `traceparent` of a span."""
    return f"00-{trace_id:032x}-{span_id:016x}-{int(is_sampled):02x}"


class SpanEvent(NamedTuple):
    """A moment within a span; `at_ns` is of perf_counter_ns."""

    name: str
    at_ns: int
    attributes: Attributes


class Span:
    """A part of a request's time. Times are perf_counter_ns; `ended_ns` 0 is not yet. Belongs to the event loop."""

    __slots__ = ("attributes", "ended_ns", "error", "events", "name", "parent", "recording", "span_id", "started_ns")

    def __init__(
        self, recording: "Recording", name: str, parent: "Span | None", attributes: Attributes, started_ns: int = 0
    ) -> None:
        self.recording = recording
        self.name = name
        self.parent = parent
        self.attributes = attributes
        self.started_ns = started_ns or perf_counter_ns()
        self.ended_ns = 0
        self.span_id = getrandbits(64) or 1
        self.events: list[SpanEvent] = []
        self.error = ""
        """Why it failed; "" where it did not."""

    def child(self, name: str, attributes: Attributes | None = None, started_ns: int = 0) -> "Span":
        """Begin a span within this one, now or at a time that has passed."""
        return self.recording.add(Span(self.recording, name, self, attributes or {}, started_ns))

    def note(self, event: str, attributes: Attributes | None = None, at_ns: int = 0) -> None:
        """Record an event, by default now."""
        self.events.append(SpanEvent(event, at_ns or perf_counter_ns(), attributes or {}))

    def end(self, at_ns: int = 0) -> None:
        """End the span, by default now. Idempotent."""
        if not self.ended_ns:
            self.ended_ns = max(at_ns or perf_counter_ns(), self.started_ns)
            self.recording.on_ended()

    def end_all(self) -> None:
        """End the span and what is open within it: its work is over."""
        for each in reversed(self.recording.spans):
            if not each.ended_ns and any(above is self for above in each.around()):
                each.end()
        self.end()

    def around(self) -> Iterator["Span"]:
        """Yield the spans around this one, the innermost first."""
        above = self.parent
        while above is not None:
            yield above
            above = above.parent

    @property
    def traceparent(self) -> str:
        """The header for requests that this span sends to other servers; "" for none."""
        recording = self.recording
        if recording.is_exported:
            return format_traceparent(recording.trace_id, self.span_id, is_sampled=recording.is_sampled)
        parent = recording.parent
        return "" if parent is None else format_traceparent(parent[0], parent[1], is_sampled=parent.is_sampled)


class Recording:
    """The spans of one request, the first of which is its root. It is complete when all of them have ended."""

    def __init__(
        self,
        name: str,
        request_id: str,
        attributes: Attributes,
        on_complete: Callable[["Recording"], None],
        parent: RemoteParent | None = None,
        *,
        is_sampled: bool = False,
        is_exported: bool = False,
        started_ns: int = 0,
    ) -> None:
        """`is_exported`: its spans may be sent to a collector, so that other servers can refer to them."""
        self.trace_id = getrandbits(128) or 1 if parent is None else parent.trace_id
        self.parent = parent
        self.request_id = request_id
        self.is_sampled = is_sampled
        self.is_exported = is_exported
        self.epoch_ns = time_ns() - perf_counter_ns()
        """Nanoseconds that, added to the times of its spans, make them nanoseconds since 1970."""
        self.num_dropped = 0
        """Spans that were not kept."""
        self.model = ""
        """The language model that it is for; "" for none."""
        self.owner: object = None
        """The sender of the request; None where nobody is asked."""
        self.on_generation: Callable[[Recording], None] | None = None
        """Called when a language model begins to work for it."""
        self._num_open = 1
        self._on_complete = on_complete
        self.root = Span(self, name, None, attributes, started_ns)
        self.spans = [self.root]

    def add(self, span: Span) -> Span:
        """Keep a new span, while there is room."""
        self._num_open += 1
        if len(self.spans) < MAX_SPANS:
            self.spans.append(span)
        else:
            self.num_dropped += 1
        return span

    def on_ended(self) -> None:
        """Note the end of a span."""
        self._num_open -= 1
        if self._num_open == 0:
            self._on_complete(self)

    @property
    def is_complete(self) -> bool:
        return self._num_open == 0


class TimelineRing:
    """The recordings of the last requests that made a language model generate. Belongs to the event loop."""

    def __init__(self, size: int) -> None:
        """`size` is how many are kept. A request id that comes again replaces the request before."""
        self._size = size
        self._recordings: OrderedDict[str, Recording] = OrderedDict()

    def keep(self, recording: Recording) -> None:
        """Keep a recording, in the place of the oldest. It need not be complete. Idempotent."""
        kept = self._recordings
        kept.pop(recording.request_id, None)
        kept[recording.request_id] = recording
        if len(kept) > self._size:
            kept.popitem(last=False)

    def find(self, request_id: str) -> Recording | None:
        """Return a request's recording; None where there is none."""
        return self._recordings.get(request_id)

    def recordings(self) -> list[Recording]:
        """Return the recordings, the oldest first."""
        return list(self._recordings.values())


current_span: ContextVar[Span | None] = ContextVar("current_span", default=None)
"""The innermost open span of what this task works for; None where nobody records."""


@contextmanager
def span(name: str, attributes: Attributes | None = None) -> Iterator[Span | None]:
    """Record a span from here to the end of the context; nothing where nobody records."""
    above = current_span.get()
    if above is None:
        yield None
        return
    here = above.child(name, attributes)
    current_span.set(here)
    try:
        yield here
    except Exception as error:
        here.error = str(error) or type(error).__name__
        raise
    finally:
        here.end()
        current_span.set(above)
