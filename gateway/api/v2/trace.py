"""The traces of Triton's trace extension: what is captured of a request, the steps within it, and how both are told.

Each step, a request that an ensemble or a Python model asks another model, has a trace of its own, which names the one
that it belongs to. Files have them as Triton's JSON. In Triton's mode `opentelemetry` they are spans: `InferRequest` is
the request in its protocol, with a span of the model's name within, and `compute` within that; steps have the same two.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from time import perf_counter_ns
from typing import NamedTuple

from sluice.gateway.telemetry.tracer import SpanSink
from sluice.record.spans import Attributes, Recording, RemoteParent, Span, SpanEvent, current_span
from sluice.serving.job import InferJob
from sluice.serving.model import Model
from sluice.serving.request import InferRequest
from sluice.serving.tensors.tensor import Tensor

Record = dict[str, object]
_MODEL = ("REQUEST_START", "QUEUE_START", "REQUEST_END")
_COMPUTE = ("COMPUTE_START", "COMPUTE_INPUT_END", "COMPUTE_OUTPUT_START", "COMPUTE_END")
_COMPUTE_SPANS = ("compute_input", "compute_infer", "compute_output")
_ENSEMBLE = "ensemble"


class TracedModel(NamedTuple):
    """The trace of one request to one model. `parent` is the number of the trace above it, 0 for none."""

    number: int
    parent: int
    name: str
    version: int
    events: list[SpanEvent]
    """The points that it has passed, and the tensors that it was seen with, as attributes."""
    request_id: str = ""


class Trace:
    """The trace of one request. Times are those of `perf_counter_ns`, which on Linux is the clock that Triton reads."""

    def __init__(
        self,
        choose_number: Callable[[], int],
        levels: frozenset[str],
        model: Model,
        request: InferRequest,
        done: Callable[[list[TracedModel]], None],
    ) -> None:
        """`choose_number` numbers this trace and those of its steps; `done` gets them once, when it is complete."""
        self._choose_number = choose_number
        self._levels = levels
        self._has_computation = model.spec.platform != _ENSEMBLE
        """Triton's ensembles compute nothing themselves."""
        self._done: Callable[[list[TracedModel]], None] | None = done
        self._root = Recording("trace", request.id, {}, _forget).root
        self._job_span: Span | None = None
        self._own = TracedModel(choose_number(), 0, model.name, model.version, self._root.events, request.id)
        self.capture_tensors("TENSOR_QUEUE_INPUT", list(request.inputs.values()))

    def capture(self, name: str, at_ns: int = 0) -> None:
        """Note that `name` (HTTP_RECV_START …) happened, by default now."""
        if "TIMESTAMPS" in self._levels:
            self._root.note(name, at_ns=at_ns)

    @contextmanager
    def following(self) -> Iterator[None]:
        """Note the steps of the job that is submitted within the context: in the spans of whoever records the request
        anyway, else in the trace's own."""
        before = current_span.get()
        above = before or self._root
        num_spans = len(above.recording.spans)
        current_span.set(above)
        try:
            yield
        finally:
            current_span.set(before)
            begun = above.recording.spans[num_spans:]
            self._job_span = begun[0] if begun and "TIMESTAMPS" in self._levels else None

    def capture_tensors(self, activity: str, tensors: Sequence[Tensor]) -> None:
        """Note the values of `tensors` (TENSOR_QUEUE_INPUT, TENSOR_BACKEND_OUTPUT)."""
        if "TENSORS" in self._levels:
            for tensor in tensors:
                self._root.note(activity, _describe_tensor(tensor))

    def capture_job(self, job: InferJob) -> None:
        """Note where the job's time went. Points that it did not pass are left out."""
        ended_ns = perf_counter_ns()
        computation = (
            ("COMPUTE_START", job.compute_started_ns),
            ("COMPUTE_INPUT_END", job.infer_started_ns),
            ("COMPUTE_OUTPUT_START", job.infer_ended_ns),
            ("COMPUTE_END", ended_ns if job.compute_started_ns else 0),
        )
        queue = (("REQUEST_START", job.started_ns), ("QUEUE_START", job.started_ns))
        for name, at_ns in (*queue, *(computation if self._has_computation else ()), ("REQUEST_END", ended_ns)):
            if at_ns:
                self.capture(name, at_ns)

    def finish(self) -> None:
        """Hand over the trace: the request has ended. Idempotent."""
        done, self._done = self._done, None
        if done is not None:
            steps = () if self._job_span is None else find_steps(self._job_span, self._own.number, self._choose_number)
            done([self._own, *steps])


def _forget(_: Recording) -> None:
    """Keep nothing of a recording that is complete."""


_UNTRACED = nullcontext()


def following(trace: Trace | None) -> AbstractContextManager[None]:
    """Note the steps of the job that is submitted within the context; nothing for a request that is not traced."""
    return _UNTRACED if trace is None else trace.following()


def _describe_tensor(tensor: Tensor) -> Attributes:
    elements = tensor.array.ravel().tolist()
    if tensor.datatype == "BYTES":
        data = ",".join(f'"{element.decode(errors="replace")}"' for element in elements)
    else:
        data = ",".join(map(str, elements))
    return {"name": tensor.name, "data": data, "shape": ",".join(map(str, tensor.shape)), "dtype": tensor.datatype}


# -- steps


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
    computing = [parts[name] for name in _COMPUTE_SPANS if name in parts]
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


# -- as Triton's JSON


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


# -- as spans


def send_as_spans(sink: SpanSink, parent: RemoteParent | None, traced: list[TracedModel]) -> None:
    """Send a finished trace with its steps. One without times, of a request that was refused, is nothing."""
    own = traced[0]
    stamps = [event.at_ns for event in own.events]
    if not stamps:
        return
    recording = Recording("InferRequest", str(own.number), _describe(own), sink.put, parent, started_ns=min(stamps))
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
