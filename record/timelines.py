"""Timelines: the last requests to language models, each with where its time went."""

from collections.abc import Awaitable, Callable
from typing import NamedTuple

import msgspec

from sluice.record.spans import Attributes, Recording, Span, TimelineRing

RECEIVED = "received"
"""The event of a root when its whole body has come."""
_NS_PER_MS = 1_000_000


class TimelineOwner(NamedTuple):
    """The sender of a request: the id and the name of the key."""

    key_id: str
    name: str


class TimelineEvent(msgspec.Struct, frozen=True):
    """A moment within a span."""

    name: str
    at_ms: float
    attributes: Attributes


class TimelineSpan(msgspec.Struct, frozen=True):
    """A bar of a waterfall. `parent` is the index of the span around it, None for the request itself; `end_ms` None is
    not yet."""

    index: int
    parent: int | None
    depth: int
    name: str
    start_ms: float
    end_ms: float | None
    attributes: Attributes
    events: list[TimelineEvent]
    error: str


class Timeline(msgspec.Struct, frozen=True):
    """The phases of one request. Times are milliseconds since its arrival."""

    id: str
    model: str
    is_complete: bool
    started_at: float
    """Seconds since 1970."""
    duration_ms: float | None
    time_to_first_token_ms: float | None
    trace_id: str
    totals_ms: dict[str, float]
    """The sum of its spans' times, by their name."""
    spans: list[TimelineSpan]
    """Its spans by their start; the first is the request itself."""
    num_dropped_spans: int
    object: str = "request.timeline"


class TimelineSummary(msgspec.Struct, frozen=True):
    """A request that has a timeline."""

    id: str
    model: str
    is_complete: bool
    started_at: float
    duration_ms: float | None
    time_to_first_token_ms: float | None


FindTimelines = Callable[[str, TimelineOwner | None], Awaitable[list[Timeline]]]
"""Returns the timelines of a request id, or all for "", of the server's other processes, as far as they answer in
time."""


class Timelines:
    """The timelines of all processes of a server. Belongs to the event loop."""

    def __init__(self, ring: TimelineRing | None, elsewhere: FindTimelines | None = None) -> None:
        """`ring` None: none are kept. `elsewhere` None: the server has one process."""
        self.ring = ring
        self._elsewhere = elsewhere

    async def find(self, request_id: str, owner: TimelineOwner | None) -> list[Timeline]:
        """Return the timelines of a request id, or all for "", that `owner` may see; None sees all."""
        found = self.find_here(request_id, owner)
        if self._elsewhere is not None:
            found += await self._elsewhere(request_id, owner)
        return found

    def find_here(self, request_id: str, owner: TimelineOwner | None) -> list[Timeline]:
        """Return the timelines of this process."""
        if self.ring is None:
            return []
        recordings = self.ring.recordings() if not request_id else [self.ring.find(request_id)]
        return [describe(each) for each in recordings if each is not None and owner in (None, each.owner)]


def describe(recording: Recording) -> Timeline:
    """Return the timeline of a recording, complete or not."""
    root = recording.root
    spans = [root, *sorted([*recording.spans[1:], *_arrival(root)], key=lambda each: each.started_ns)]
    indices = {span.span_id: index for index, span in enumerate(spans)}
    totals: dict[str, float] = {}
    for span in spans[1:]:
        if span.ended_ns:
            totals[span.name] = round(totals.get(span.name, 0.0) + (span.ended_ns - span.started_ns) / _NS_PER_MS, 3)
    first_ns = min((e.at_ns for span in spans for e in span.events if e.name == "first_token"), default=0)
    return Timeline(
        id=recording.request_id,
        model=recording.model,
        is_complete=recording.is_complete,
        started_at=round((root.started_ns + recording.epoch_ns) / 1e9, 6),
        duration_ms=_since(root.ended_ns, root),
        time_to_first_token_ms=_since(first_ns, root),
        trace_id=f"{recording.trace_id:032x}",
        totals_ms=totals,
        spans=[_describe_span(span, index, indices, root) for index, span in enumerate(spans)],
        num_dropped_spans=recording.num_dropped,
    )


def _arrival(root: Span) -> list[Span]:
    """Return spans of what was before the first work: the body's arrival, and its check. Traces have an event."""
    received_ns = next((event.at_ns for event in root.events if event.name == RECEIVED), 0)
    if not received_ns:
        return []
    ends = [each.started_ns for each in root.recording.spans if each.parent is root] or [root.ended_ns or received_ns]
    times = (("receive", root.started_ns, received_ns), ("validate", received_ns, max(received_ns, min(ends))))
    return [_span_of(root, *each) for each in times]


def _span_of(root: Span, name: str, started_ns: int, ended_ns: int) -> Span:
    span = Span(root.recording, name, root, {}, started_ns)
    span.ended_ns = ended_ns
    return span


def _describe_span(span: Span, index: int, indices: dict[int, int], root: Span) -> TimelineSpan:
    start_ms = _since(span.started_ns, root)
    assert start_ms is not None
    events = [
        TimelineEvent(each.name, round((each.at_ns - root.started_ns) / _NS_PER_MS, 3), each.attributes)
        for each in span.events
    ]
    parent = None if span.parent is None else indices.get(span.parent.span_id, 0)
    end_ms, depth = _since(span.ended_ns, root), len(list(span.around()))
    return TimelineSpan(index, parent, depth, span.name, start_ms, end_ms, span.attributes, events, span.error)


def _since(at_ns: int, root: Span) -> float | None:
    """Return the milliseconds since the request's arrival; None for 0, which is not yet."""
    return round(max(0, at_ns - root.started_ns) / _NS_PER_MS, 3) if at_ns else None
