"""Builds what records requests, from the configuration."""

from sluice.gateway.api.v2.trace import TraceSettings
from sluice.gateway.api.v2.trace_spans import TracesAsSpans
from sluice.gateway.api.v2.trace_values import TraceSetting
from sluice.gateway.options.option import OptionError
from sluice.gateway.options.telemetry import TraceOptions
from sluice.gateway.options.tracing import TracingOptions
from sluice.gateway.tracing.tracer import SpanSink, Tracer
from sluice.record.timelines import TimelineRing

_INSTALL = "pip install 'sluice[otel]'"


def make_tracer(options: TracingOptions) -> Tracer:
    """Build what records requests. Raises OptionError where a library is missing."""
    timelines = TimelineRing(options.num_timelines) if options.num_timelines else None
    return Tracer(timelines, _open_export(options), options.sample_rate, options.slow_s)


def _open_export(options: TracingOptions) -> SpanSink | None:
    if options.endpoint is None:
        return None
    try:
        from sluice.record.otel import ExportSettings, TraceExport, make_exporter, make_resource
    except ImportError as error:
        raise OptionError(f"--otlp-traces-endpoint needs OpenTelemetry ({error}): {_INSTALL}") from None
    settings = ExportSettings(options.max_queue_spans, options.max_batch_spans, options.delay_ms / 1000)
    return TraceExport(make_exporter(options.endpoint), make_resource(), settings, options.endpoint)


def make_trace_settings(options: TraceOptions) -> TraceSettings:
    """Build Triton's trace settings that apply until clients change them. Raises OptionError where a library is
    missing."""
    setting = TraceSetting(options.levels, options.rate, options.count, options.log_frequency)
    if options.mode == "triton":
        return TraceSettings(options.file, setting)
    try:
        from sluice.record.otel import ExportSettings, TraceExport, make_exporter, make_resource
    except ImportError as error:
        raise OptionError(f"--trace-config mode=opentelemetry needs OpenTelemetry ({error}): {_INSTALL}") from None
    settings = ExportSettings(
        options.otel_number("bsp_max_queue_size", 2048),
        options.otel_number("bsp_max_export_batch_size", 512),
        options.otel_number("bsp_schedule_delay", 5000) / 1000,
    )
    resource = make_resource({"service.name": "triton-inference-server"} | options.resource)
    export = TraceExport(make_exporter(options.url), resource, settings, options.url)
    return TraceSettings("", setting, TracesAsSpans(export, options.otel_settings))
