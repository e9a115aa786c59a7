"""Triton's mode `opentelemetry`: traces of its trace extension as the spans that Triton sends.

`InferRequest` is the request in its protocol, with a span of the model's name within, and `compute` within that.
"""

from typing import Any

from gateway.tracing.tracer import SpanSink
from gateway.v2.trace import Trace, TraceValue
from sluice.spans import Attributes, Recording, RemoteParent, Span

_MODEL = ("REQUEST_START", "QUEUE_START", "REQUEST_END")
_COMPUTE = ("COMPUTE_START", "COMPUTE_INPUT_END", "COMPUTE_OUTPUT_START", "COMPUTE_END")


class TracesAsSpans:
    """Sends traces to a collector."""

    def __init__(self, sink: SpanSink, settings: dict[str, str]) -> None:
        """`settings` are shown to clients, by Triton's names."""
        self.sink = sink
        self.settings: dict[str, TraceValue] = {**settings}

    async def close(self) -> None:
        """Send what is left, for a short time."""
        await self.sink.close()

    def put(self, parent: RemoteParent | None, trace: Trace) -> None:
        """Send a finished trace. One without times, of a request that was refused, is nothing."""
        head, *records = trace.records
        times = [(each["name"], each["ns"]) for record in records for each in _timestamps(record)]
        if times:
            _build(head, times, self.sink, parent)


def _timestamps(record: dict[str, Any]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = record.get("timestamps", [])
    return found


def _build(head: dict[str, Any], times: list[tuple[str, int]], sink: SpanSink, parent: RemoteParent | None) -> None:
    attributes: Attributes = {
        "triton.model_name": head["model_name"],
        "triton.model_version": int(head["model_version"]),
        "triton.trace_id": head["id"],
        "triton.trace_parent_id": 0,
    }
    if "request_id" in head:
        attributes["triton.request_id"] = head["request_id"]
    stamps = [at_ns for _, at_ns in times]
    recording = Recording(
        "InferRequest", str(head["id"]), attributes, sink.put, parent, is_sampled=True, started_ns=min(stamps)
    )
    root, above = recording.root, recording.root
    for name, events in ((str(head["model_name"]), _MODEL), ("compute", _COMPUTE)):
        own = [(event, at_ns) for event, at_ns in times if event in events]
        if own:
            above = above.child(name, {**attributes} if above is root else {}, min(at_ns for _, at_ns in own))
            _note(above, own)
    _note(root, [(event, at_ns) for event, at_ns in times if event not in (*_MODEL, *_COMPUTE)])
    for span in reversed(recording.spans):
        span.end(max((each.at_ns for each in span.events), default=max(stamps)) if span is not root else max(stamps))


def _note(span: Span, times: list[tuple[str, int]]) -> None:
    for name, at_ns in sorted(times, key=lambda each: each[1]):
        span.note(name, at_ns=at_ns)
