"""Triton's mode `opentelemetry`: traces of its trace extension as the spans that Triton sends.

`InferRequest` is the request in its protocol, with a span of the model's name within, and `compute` within that. The
models that an ensemble or a Python model asks have the same two, within the span of the one that asks them.
"""

from sluice.gateway.api.v2.trace_steps import TracedModel
from sluice.gateway.api.v2.trace_values import TraceValue
from sluice.gateway.tracing.tracer import SpanSink
from sluice.record.spans import Attributes, Recording, RemoteParent, Span, SpanEvent

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

    def put(self, parent: RemoteParent | None, traced: list[TracedModel]) -> None:
        """Send a finished trace with its steps. One without times, of a request that was refused, is nothing."""
        own = traced[0]
        stamps = [event.at_ns for event in own.events]
        if not stamps:
            return
        recording = Recording(
            "InferRequest", str(own.number), _describe(own), self.sink.put, parent, started_ns=min(stamps)
        )
        recording.is_sampled = True
        models = {0: recording.root}
        for each in traced:
            models[each.number] = _add_model(models[each.parent], each)
        _note(recording.root, [event for event in own.events if event.name not in (*_MODEL, *_COMPUTE)])
        recording.root.end(max(stamps))


def _describe(traced: TracedModel) -> Attributes:
    found: Attributes = {
        "triton.model_name": traced.name,
        "triton.model_version": traced.version,
        "triton.trace_id": traced.number,
        "triton.trace_parent_id": traced.parent,
    }
    return found | {"triton.request_id": traced.request_id} if traced.request_id else found


def _add_model(above: Span, traced: TracedModel) -> Span:
    """Add the span of a model and that of its computation, as far as there are times of them. Returns the former, or
    `above` without one."""
    added = above
    for name, points in ((traced.name, _MODEL), ("compute", _COMPUTE)):
        own = sorted((event for event in traced.events if event.name in points), key=_time_of)
        if own:
            span = added.child(name, _describe(traced) if points is _MODEL else {}, own[0].at_ns)
            _note(span, own)
            span.end(own[-1].at_ns)
            added = span if points is _MODEL else added
    return added


def _note(span: Span, events: list[SpanEvent]) -> None:
    span.events += sorted(events, key=_time_of)


def _time_of(event: SpanEvent) -> int:
    return event.at_ns
