"""The steps of a traced request: what an ensemble, or a Python model, asks other models. As in Triton, each has a trace
of its own, which names the one that it belongs to."""

from collections.abc import Callable, Iterator
from typing import NamedTuple

from sluice.record.spans import Span, SpanEvent

Record = dict[str, object]
_COMPUTE = ("compute_input", "compute_infer", "compute_output")


class TracedModel(NamedTuple):
    """The trace of one request to one model. `parent` is the number of the trace above it, 0 for none."""

    number: int
    parent: int
    name: str
    version: int
    events: list[SpanEvent]
    """The points that it has passed, and the tensors that it was seen with, as attributes."""
    request_id: str = ""


def to_records(traced: TracedModel) -> Iterator[Record]:
    """Yield a trace as Triton's JSON has it."""
    yield {"id": traced.number, "model_name": traced.name, "model_version": traced.version, **_references(traced)}
    for name, at_ns, tensor in traced.events:
        if tensor:
            yield {"id": traced.number, "activity": name, "tensor": tensor}
        else:
            yield {"id": traced.number, "timestamps": [{"name": name, "ns": at_ns}]}


def _references(traced: TracedModel) -> Record:
    if traced.parent:
        return {"parent_id": traced.parent}
    return {"request_id": traced.request_id} if traced.request_id else {}


def find_steps(job: Span, number: int, choose_number: Callable[[], int]) -> Iterator[TracedModel]:
    """Yield the steps within the span of a job, whose trace has `number`; those above others first."""
    numbers = {job.span_id: number}
    for span in job.recording.spans:  # in the order in which they have begun
        parent = next((numbers[above.span_id] for above in span.around() if above.span_id in numbers), 0)
        if parent and span.name == f"infer {span.attributes.get('sluice.model')}":
            numbers[span.span_id] = choose_number()
            name, version = str(span.attributes["sluice.model"]), int(str(span.attributes["sluice.model_version"]))
            events = [SpanEvent(point, at_ns, {}) for point, at_ns in _find_times(span)]
            yield TracedModel(numbers[span.span_id], parent, name, version, events)


def _find_times(span: Span) -> Iterator[tuple[str, int]]:
    """Yield the points that a step has passed. Parts that took no time have no span."""
    parts = {each.name: each for each in span.recording.spans if each.parent is span}
    computing = [parts[name] for name in _COMPUTE if name in parts]
    yield "REQUEST_START", span.started_ns
    yield "QUEUE_START", parts["queue"].started_ns if "queue" in parts else span.started_ns
    if computing:
        yield "COMPUTE_START", computing[0].started_ns
        if (running := parts.get("compute_infer")) is not None:
            yield "COMPUTE_INPUT_END", running.started_ns
            yield "COMPUTE_OUTPUT_START", running.ended_ns
        yield "COMPUTE_END", computing[-1].ended_ns
    if span.ended_ns:
        yield "REQUEST_END", span.ended_ns
