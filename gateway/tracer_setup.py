"""Builds what records requests, from the configuration."""

from gateway.options.option import OptionError
from gateway.options.tracing import TracingOptions
from gateway.service import InferenceService
from gateway.tracing.timelines import TimelineRing
from gateway.tracing.tracer import SpanSink, Tracer


def make_tracer(options: TracingOptions) -> Tracer:
    """Build what records requests. Raises OptionError where a library is missing."""
    timelines = TimelineRing(options.num_timelines) if options.num_timelines else None
    return Tracer(timelines, _open_export(options), options.sample_rate, options.slow_s)


def _open_export(options: TracingOptions) -> SpanSink | None:
    if options.endpoint is None:
        return None
    try:
        from gateway.tracing.export import ExportSettings, TraceExport, make_exporter, make_resource
    except ImportError as error:
        raise OptionError(f"--otlp-traces-endpoint needs OpenTelemetry ({error}): pip install 'sluice[otel]'") from None
    settings = ExportSettings(options.max_queue_spans, options.max_batch_spans, options.delay_ms / 1000)
    return TraceExport(make_exporter(options.endpoint), make_resource(), settings, options.endpoint)


def watch_tracer(service: InferenceService) -> None:
    """Count the spans that are sent, and send the last ones when the service closes."""
    service.metrics.registry.register(service.tracer)
    service.close_last(service.tracer.close)
