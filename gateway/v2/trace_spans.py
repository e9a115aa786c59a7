"""Triton's mode `opentelemetry`: traces of its trace extension as the spans that Triton sends.

`InferRequest` is the request in its protocol, with a span of the model's name within, and `compute` within that. The
models that an ensemble or a Python model asks have the same two, within the span of the one that asks them.
"""

from typing import Any

from sluice.gateway.tracing.tracer import SpanSink
from sluice.gateway.v2.trace import Trace
from sluice.gateway.v2.trace_steps import StepTrace
from sluice.gateway.v2.trace_values import TraceValue
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
            _build(head, times, trace.steps, self.sink, parent)


def _timestamps(record: dict[str, Any]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = record.get("timestamps", [])
    return found


def _build(
    head: dict[str, Any],
    times: list[tuple[str, int]],
    steps: list[StepTrace],
    sink: SpanSink,
    parent: RemoteParent | None,
) -> None:
    attributes = _describe(head["model_name"], int(head["model_version"]), head["id"], 0)
    if "request_id" in head:
        attributes["triton.request_id"] = head["request_id"]
    stamps = [at_ns for _, at_ns in times]
    recording = Recording(
        "InferRequest", str(head["id"]), attributes, sink.put, parent, is_sampled=True, started_ns=min(stamps)
    )
    root = recording.root
    models = {head["id"]: _add_model(root, str(head["model_name"]), {**attributes}, times)}
    for step in steps:
        described = _describe(step.model_name, step.model_version, step.number, step.parent)
        models[step.number] = _add_model(models[step.parent], step.model_name, described, step.times)
    _note(root, [(event, at_ns) for event, at_ns in times if event not in (*_MODEL, *_COMPUTE)])
    root.end(max(stamps))


def _describe(model_name: str, model_version: int, number: int, parent: int) -> Attributes:
    return {
        "triton.model_name": model_name,
        "triton.model_version": model_version,
        "triton.trace_id": number,
        "triton.trace_parent_id": parent,
    }


def _add_model(above: Span, model_name: str, attributes: Attributes, times: list[tuple[str, int]]) -> Span:
    """Add the span of a model and that of its computation, as far as there are times of them. Returns the former, or
    `above` without one."""
    added = above
    for name, events in ((model_name, _MODEL), ("compute", _COMPUTE)):
        own = sorted(((event, at_ns) for event, at_ns in times if event in events), key=lambda each: each[1])
        if own:
            span = added.child(name, attributes if events is _MODEL else {}, own[0][1])
            _note(span, own)
            span.end(own[-1][1])
            added = span if events is _MODEL else added
    return added


def _note(span: Span, times: list[tuple[str, int]]) -> None:
    for name, at_ns in sorted(times, key=lambda each: each[1]):
        span.note(name, at_ns=at_ns)
