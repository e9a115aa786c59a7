"""The tracer: begins the recording of each request, decides which are kept, and hands those on."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from sluice.gateway.calls import current_identity
from sluice.gateway.options.option import OptionError
from sluice.gateway.options.tracing import TracingOptions
from sluice.pipelines.text.model import may_generate
from sluice.pipelines.text.types import TextEvent
from sluice.record.spans import Attributes, Recording, Span, TimelineRing, current_span, remote_parent
from sluice.serving.model import Model

_NS_PER_S = 1_000_000_000
_INSTALL = "pip install 'sluice[otel]'"
_RATIO_BITS = (1 << 64) - 1
"""Bits of a trace id that OpenTelemetry's ratio sampler compares, so that other servers decide alike."""
_CHATS = ("chat", "anthropic", "messages", "responses")
"""Parts of the protocols' names whose requests are conversations."""


class SpanSink(Protocol):
    """Where recordings go that are kept. Must not block, and must not raise."""

    num_exported: int
    num_lost: int

    def put(self, recording: Recording) -> None:
        """Take a recording, or count its spans as lost."""

    async def close(self) -> None:
        """Send what is left, for a short time."""


class Tracer(Collector):
    """Records requests, for a collector of traces and for timelines. Belongs to the event loop."""

    def __init__(
        self,
        timelines: TimelineRing | None = None,
        sink: SpanSink | None = None,
        sample_rate: float = 1.0,
        slow_s: float | None = None,
    ) -> None:
        """`sink` None: no traces leave the server. `sample_rate` is of requests without a sampled parent, from 0 to 1;
        `slow_s` keeps every other request too that takes longer."""
        self.timelines = timelines
        self.sink = sink
        self._bound = round(sample_rate * (_RATIO_BITS + 1))
        self._slow_s = slow_s

    @property
    def is_active(self) -> bool:
        """Whether requests are recorded at all."""
        return self.sink is not None or self.timelines is not None

    @property
    def is_exporting(self) -> bool:
        """Whether requests are recorded that have no timeline: those that make no language model generate."""
        return self.sink is not None

    def records(self, model: Model) -> bool:
        """Whether requests to `model` are recorded: where no trace is sent, those alone that may have a timeline."""
        return self.sink is not None or (self.timelines is not None and may_generate(model))

    def open(self, name: str, request_id: str, attributes: Attributes, started_ns: int = 0) -> Span | None:
        """Begin the recording of a request, and make its root the current span; None where it is not recorded."""
        if self.sink is None and self.timelines is None:
            return None
        parent = remote_parent.get()
        recording = Recording(
            name,
            request_id,
            attributes | {"sluice.request_id": request_id},
            self._complete,
            parent,
            is_exported=self.sink is not None,
            started_ns=started_ns,
        )
        if self.sink is not None:
            recording.is_sampled = self._samples(recording.trace_id) if parent is None else parent.is_sampled
        if self.timelines is None and not recording.is_sampled and self._slow_s is None:
            return None
        if self.timelines is not None:
            recording.on_generation = self.timelines.keep
        current_span.set(recording.root)
        return recording.root

    def _samples(self, trace_id: int) -> bool:
        return trace_id & _RATIO_BITS < self._bound

    def _complete(self, recording: Recording) -> None:
        if self.sink is not None and (recording.is_sampled or self._is_slow(recording)):
            self.sink.put(recording)

    def _is_slow(self, recording: Recording) -> bool:
        root = recording.root
        return self._slow_s is not None and root.ended_ns - root.started_ns >= self._slow_s * _NS_PER_S

    def collect(self) -> Iterable[Metric]:
        """Return the families of the spans that went to the collector, and of those that did not."""
        if self.sink is None:
            return
        text = "Spans that a trace collector took."
        yield CounterMetricFamily("sluice_trace_spans_exported", text, self.sink.num_exported)
        text = "Spans that were lost, because the trace collector did not take them in time."
        yield CounterMetricFamily("sluice_trace_spans_lost", text, self.sink.num_lost)

    async def close(self) -> None:
        """Send what is left. Idempotent."""
        if self.sink is not None:
            await self.sink.close()


def finish_root(root: Span, status: int | None, *, is_failure: bool) -> None:
    """End the root of a request with its protocol's status, None where the client got none."""
    if status is None:
        root.attributes["sluice.outcome"] = "cancelled"
    elif is_failure and not root.error:
        root.error = f"status {status}"
    root.end()


def make_tracer(options: TracingOptions) -> Tracer:
    """Build what records requests. Raises OptionError where a library is missing."""
    timelines = TimelineRing(options.num_timelines) if options.num_timelines else None
    sink = None
    if options.endpoint is not None:
        numbers = (options.max_queue_spans, options.max_batch_spans, options.delay_ms)
        sink = open_export("--otlp-traces-endpoint", options.endpoint, numbers)
    return Tracer(timelines, sink, options.sample_rate, options.slow_s)


def open_export(
    option: str, endpoint: str, numbers: Sequence[int], resource: Mapping[str, str] | None = None
) -> SpanSink:
    """Return what sends spans, for an option. `numbers` are most spans that wait, most in a message, and milliseconds
    from one to the next. Raises OptionError where a library is missing."""
    try:
        from sluice.record.otel import ExportSettings, TraceExport, make_exporter, make_resource
    except ImportError as error:
        raise OptionError(f"{option} needs OpenTelemetry ({error}): {_INSTALL}") from None
    max_queue, max_batch, delay_ms = numbers
    settings = ExportSettings(max_queue, max_batch, delay_ms / 1000)
    return TraceExport(make_exporter(endpoint), make_resource(resource), settings, endpoint)


# -- the spans of generations, with attributes by OpenTelemetry's conventions for generative AI


def begin_generation(model: str, protocol: str) -> Span | None:
    """Begin the span of a generation, and make it the current one; None where nobody records."""
    above = current_span.get()
    if above is None:
        return None
    recording = above.recording
    if not recording.model:
        recording.model = model
        identity = current_identity()
        recording.owner = None if identity is None else (identity.key_id, identity.name)
        if recording.on_generation is not None:
            recording.on_generation(recording)
    operation = "chat" if any(word in protocol for word in _CHATS) else "text_completion"
    attributes: Attributes = {"gen_ai.operation.name": operation, "gen_ai.provider.name": "sluice"}
    attributes |= {"gen_ai.request.model": model, "gen_ai.response.model": model, "sluice.protocol": protocol}
    span = above.child(f"{operation} {model}", attributes)
    current_span.set(span)
    return span


def note_answer(span: Span, end: TextEvent) -> None:
    """Note what the last event of an answer says."""
    assert end.finish_reason is not None
    span.attributes |= {
        "gen_ai.usage.input_tokens": end.prompt_tokens,
        "gen_ai.usage.output_tokens": end.completion_tokens,
        "gen_ai.usage.cache_read.input_tokens": end.cached_tokens,
        "gen_ai.response.finish_reasons": (end.finish_reason.value,),
    }


def end_generation(span: Span, outcome: str) -> None:
    """End the span, and what is open within it; `outcome` is `ok`, `cancelled` or an error code."""
    span.attributes["sluice.outcome"] = outcome
    span.end_all()
    if current_span.get() is span:
        current_span.set(span.parent)
