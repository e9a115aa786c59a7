"""Options of traces and timelines."""

from dataclasses import dataclass
from urllib.parse import urlsplit

from sluice.gateway.options.option import integer, option, seconds


def _parse_endpoint(text: str) -> str:
    parts = urlsplit(text)
    if parts.scheme not in ("http", "https", "grpc", "grpcs") or not parts.hostname:
        raise ValueError("http://HOST:4318, https://HOST:PORT, grpc://HOST:4317 or grpcs://HOST:PORT")
    return text


def _parse_rate(text: str) -> float:
    try:
        rate = float(text)
    except ValueError:
        rate = -1.0
    if not 0 <= rate <= 1:
        raise ValueError("a number from 0 to 1")
    return rate


@dataclass(frozen=True, slots=True)
class TracingOptions:
    """Traces by OpenTelemetry, and timelines: where the time of each request goes"""

    endpoint: str | None = option(
        "--otlp-traces-endpoint",
        None,
        _parse_endpoint,
        "URL",
        "Send traces of requests to this collector by OTLP: http://HOST:4318 or https:// by HTTP (the path is "
        "/v1/traces where it has none), grpc://HOST:4317 or grpcs:// by gRPC. Needs 'sluice[otel]'. Default: nowhere",
    )
    sample_rate: float = option(
        "--trace-sample-rate",
        1.0,
        _parse_rate,
        "RATE",
        "Share of the requests whose traces are sent, from 0 to 1. One with a traceparent is sampled as that says",
    )
    slow_s: float | None = option(
        "--trace-slow-secs",
        None,
        seconds(0.0),
        "SECONDS",
        "Send the traces of all requests that take at least this long, too, whatever the rate",
    )
    max_queue_spans: int = option(
        "--trace-export-queue",
        2048,
        integer(1),
        "N",
        "Most spans that wait for the collector; more are lost, and counted in sluice_trace_spans_lost_total",
        variable="OTEL_BSP_MAX_QUEUE_SIZE",
    )
    max_batch_spans: int = option(
        "--trace-export-batch",
        512,
        integer(1),
        "N",
        "Most spans in one message to the collector",
        variable="OTEL_BSP_MAX_EXPORT_BATCH_SIZE",
    )
    delay_ms: int = option(
        "--trace-export-delay-ms",
        5000,
        integer(1),
        "MS",
        "Longest wait of a span for others to be sent with",
        variable="OTEL_BSP_SCHEDULE_DELAY",
    )
    num_timelines: int = option(
        "--timeline-requests",
        256,
        integer(0),
        "N",
        "Keep the timelines of the last N requests to language models, for GET /v1/requests/ID/timeline. About 10 KB "
        "each; 0 keeps none",
    )
