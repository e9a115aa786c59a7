"""Sends recordings to a collector of traces, by OpenTelemetry's SDK. Needs `sluice[otel]`."""

import asyncio
import logging
import threading
from collections.abc import Mapping, Sequence
from time import monotonic
from typing import NamedTuple
from urllib.parse import urlsplit

from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags, TraceState

from sluice import __version__
from sluice.record.batches import BatchWriter
from sluice.record.spans import Recording, RemoteParent, Span

log = logging.getLogger(__name__)
_HTTP_PATH = "/v1/traces"
_WARN_S = 60.0
_CLOSE_S = 3.0
_SCOPE = InstrumentationScope("sluice", __version__)
_UNSET = Status(StatusCode.UNSET)
_SAMPLED = TraceFlags(TraceFlags.SAMPLED)
_LIBRARY_LOGS = ("opentelemetry.exporter.otlp", "opentelemetry.sdk")
"""The library logs each batch that fails under these names; we say it once a minute."""


class _Described(Resource):
    """A resource that computes its hash once: the library asks for it with each span, and writes JSON for it."""

    def __init__(self, described: Resource) -> None:
        super().__init__(described.attributes, described.schema_url)
        self._hash = super().__hash__()

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return self is other or super().__eq__(other)


class ExportSettings(NamedTuple):
    """Limits of the sender of spans: the most that wait, the most in a request, and the seconds that fewer wait for
    more."""

    max_queue_spans: int = 2048
    max_batch_spans: int = 512
    delay_s: float = 5.0


def make_exporter(endpoint: str) -> SpanExporter:
    """Return OpenTelemetry's exporter for `http://HOST:4318`, `https://…`, `grpc://HOST:4317` or `grpcs://…`. Headers,
    certificates, time limits and compression are those of the OTEL_EXPORTER_OTLP_ variables."""
    parts = urlsplit(endpoint)
    if parts.scheme in ("grpc", "grpcs"):
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as GrpcExporter

        return GrpcExporter(endpoint=parts.netloc, insecure=parts.scheme == "grpc")
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as HttpExporter

    return HttpExporter(endpoint=endpoint if parts.path.strip("/") else f"{endpoint.rstrip('/')}{_HTTP_PATH}")


def make_resource(attributes: Mapping[str, str] | None = None) -> Resource:
    """Return the resource attributes of this server: our defaults, then OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES,
    then `attributes`."""
    own = Resource({"service.name": "sluice", "service.version": __version__})
    return _Described(own.merge(OTELResourceDetector().detect()).merge(Resource(dict(attributes or {}))))


class TraceExport(BatchWriter[Recording]):
    """Takes recordings on the event loop and sends their spans from a thread. What does not fit is lost and counted."""

    def __init__(self, exporter: SpanExporter, resource: Resource, settings: ExportSettings, target: str = "") -> None:
        """`target` names the collector in the log."""
        super().__init__("trace-export", settings.max_queue_spans, settings.max_batch_spans, settings.delay_s, _CLOSE_S)
        self.num_exported = 0
        self.num_lost = 0
        self._exporter = exporter
        self._resource = resource
        self._max_batch_spans = settings.max_batch_spans
        self._target = target
        self._lock = threading.Lock()
        self._warned_at = -_WARN_S
        for name in _LIBRARY_LOGS:
            logging.getLogger(name).setLevel(logging.CRITICAL)

    def put(self, recording: Recording) -> None:
        """Take a recording, or count its spans as lost where too many wait."""
        num_spans = len(recording.spans)
        if not self.offer(recording, num_spans):
            self._lose(num_spans, "more spans wait than --trace-export-queue allows")

    def write(self, items: list[Recording]) -> None:
        """Send the spans of recordings."""
        spans = [span for each in items for span in convert(each, self._resource)]
        for start in range(0, len(spans), self._max_batch_spans):
            self._send(spans[start : start + self._max_batch_spans])

    async def close(self) -> None:
        """Send what waits, for a short time. Idempotent."""
        await super().close()
        await asyncio.to_thread(self._exporter.shutdown)

    def _send(self, spans: Sequence[ReadableSpan]) -> None:
        try:
            result = self._exporter.export(spans)
        except Exception as error:  # whatever the library raises must not end the thread
            result, reason = SpanExportResult.FAILURE, f"{type(error).__name__}: {error}"
        else:
            reason = "it did not take them"
        if result is SpanExportResult.SUCCESS:
            self.num_exported += len(spans)
        else:
            self._lose(len(spans), reason)

    def _lose(self, num_spans: int, reason: str) -> None:
        with self._lock:
            self.num_lost += num_spans
            is_told, now = monotonic() - self._warned_at < _WARN_S, monotonic()
            if not is_told:
                self._warned_at = now
        if not is_told:
            text = "spans for %s are lost, %d so far: %s; requests go on (said once a minute)"
            log.warning(text, self._target or "the trace collector", self.num_lost, reason)


def convert(recording: Recording, resource: Resource) -> list[ReadableSpan]:
    """Return the spans of a recording as OpenTelemetry's."""
    parent, state = recording.parent, None
    if parent is not None and parent.state:
        state = TraceState.from_header([parent.state])
    contexts = {
        span.span_id: SpanContext(
            recording.trace_id, span.span_id, is_remote=False, trace_flags=_SAMPLED, trace_state=state
        )
        for span in recording.spans
    }
    above = None if parent is None else _remote_context(parent, state)
    return [_convert_span(span, recording.epoch_ns, contexts, above, resource) for span in recording.spans]


def _remote_context(parent: RemoteParent, state: TraceState | None) -> SpanContext:
    return SpanContext(parent.trace_id, parent.span_id, is_remote=True, trace_flags=_SAMPLED, trace_state=state)


def _convert_span(
    span: Span, epoch_ns: int, contexts: Mapping[int, SpanContext], above: SpanContext | None, resource: Resource
) -> ReadableSpan:
    parent = above if span.parent is None else contexts.get(span.parent.span_id)
    events = [Event(each.name, each.attributes, each.at_ns + epoch_ns) for each in span.events]
    return ReadableSpan(
        name=span.name,
        context=contexts[span.span_id],
        parent=parent,
        resource=resource,
        attributes=span.attributes,
        events=events,
        kind=SpanKind.SERVER if span.parent is None else SpanKind.INTERNAL,
        status=Status(StatusCode.ERROR, span.error) if span.error else _UNSET,
        start_time=span.started_ns + epoch_ns,
        end_time=(span.ended_ns or span.started_ns) + epoch_ns,
        instrumentation_scope=_SCOPE,
    )
