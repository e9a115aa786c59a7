"""Pushes metrics to an OpenTelemetry collector: those of the GenAI conventions, and all of ours.

The library's exporters send what is made here of our own counts at each interval, so a request costs no more than
without them. Each process pushes its own counts, as an instance of its own. The exporters' own variables count too:
OTEL_EXPORTER_OTLP_HEADERS, OTEL_EXPORTER_OTLP_CERTIFICATE, OTEL_RESOURCE_ATTRIBUTES and others.
"""

import asyncio
import logging
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from importlib.metadata import version
from operator import sub
from typing import NamedTuple
from urllib.parse import urlsplit
from uuid import uuid4

from opentelemetry.sdk.metrics import Exemplar
from opentelemetry.sdk.metrics.export import (
    AggregationTemporality,
    Gauge,
    HistogramDataPoint,
    Metric,
    MetricExporter,
    MetricExportResult,
    MetricsData,
    NumberDataPoint,
    ResourceMetrics,
    ScopeMetrics,
    Sum,
)
from opentelemetry.sdk.metrics.export import Histogram as HistogramPoints
from opentelemetry.sdk.resources import SERVICE_INSTANCE_ID, SERVICE_NAME, SERVICE_VERSION, Resource
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from prometheus_client.core import Metric as Family

from sluice.gateway.telemetry.families import BucketFamily, Row
from sluice.gateway.telemetry.metrics import GatewayMetrics
from sluice.gateway.telemetry.record import RequestTally
from sluice.record.histogram import Histogram

log = logging.getLogger(__name__)

TIMEOUT_S = 10.0
_OURS = "sluice_"
_NS = 1_000_000_000
_CHATS = ("openai_chat", "anthropic_messages", "ollama_chat", "rag")
"""Protocols whose operation is a chat; that of others is the completion of a text."""
Tallies = Mapping[Row, RequestTally]
"""Tallies by model and protocol."""
Attributes = dict[str, str]


def open_exporter(endpoint: str, protocol: str) -> MetricExporter:
    """Return the exporter to a collector at `endpoint`, over `protocol`: grpc or http."""
    if protocol == "http":
        from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter as HttpExporter

        has_path = urlsplit(endpoint).path not in ("", "/")
        return HttpExporter(endpoint if has_path else endpoint.rstrip("/") + "/v1/metrics", timeout=TIMEOUT_S)
    from opentelemetry.exporter.otlp.proto.grpc.metric_exporter import OTLPMetricExporter as GrpcExporter

    return GrpcExporter(endpoint, timeout=TIMEOUT_S)


class OtlpPush:
    """Pushes the metrics of a process at intervals, and once more at its end.

    It belongs to the event loop, whose counts it reads; the exporter sends in a thread.
    """

    def __init__(self, metrics: GatewayMetrics, process: str, exporter: MetricExporter, interval_s: float) -> None:
        """`process` is "gateway" or "worker-N"."""
        self._metrics = metrics
        self._exporter = exporter
        self._interval_s = interval_s
        self._resource = _make_resource(process)
        self._started_ns = time.time_ns()
        self._is_failing = False
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to push, on the running event loop."""
        self._task = asyncio.create_task(self._run(), name="otlp-metrics")

    async def close(self) -> None:
        """Push what was counted last, and end."""
        if self._task is None:
            return
        self._task.cancel()
        with suppress(asyncio.CancelledError):
            await self._task
        self._task = None
        await self.push()
        await asyncio.to_thread(self._exporter.shutdown)

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(self._interval_s)
            await self.push()

    async def push(self) -> None:
        """Push the counts of now. A failure is logged, once until one succeeds: the next push has these counts too."""
        data = make_data(self._metrics, self._resource, self._started_ns, time.time_ns())
        try:
            result = await asyncio.to_thread(self._exporter.export, data)
            problem = "" if result is MetricExportResult.SUCCESS else "the exporter's own lines say why"
        except Exception as error:
            problem = str(error) or type(error).__name__
        if problem and not self._is_failing:
            log.warning("metrics do not reach --otlp-metrics-endpoint, and are pushed again later: %s", problem)
        self._is_failing = bool(problem)


def _make_resource(process: str) -> Resource:
    """Return what the metrics are of: the environment's attributes, and a name for what those leave out."""
    own = {SERVICE_VERSION: version("sluice"), SERVICE_INSTANCE_ID: str(uuid4()), "sluice.process": process}
    resource = Resource.create({})
    if str(resource.attributes[SERVICE_NAME]).startswith("unknown_service"):
        own[SERVICE_NAME] = "sluice"
    return Resource(own).merge(resource) if SERVICE_NAME not in own else resource.merge(Resource(own))


def make_data(metrics: GatewayMetrics, resource: Resource, started_ns: int, now_ns: int) -> MetricsData:
    """Return all that a process has counted, in the library's values."""
    made = _Points(started_ns, now_ns)
    genai = [made.genai(each) for each in genai_families(metrics.tallies)]
    ours = [metric for family in metrics.registry.collect() for metric in made.family(family)]
    scopes = [ScopeMetrics(InstrumentationScope("sluice"), [*genai, *ours], "")]
    return MetricsData([ResourceMetrics(resource, scopes, "")])


class _Points:
    """Makes the library's points of counts between two times."""

    def __init__(self, started_ns: int, now_ns: int) -> None:
        self._times = started_ns, now_ns

    def genai(self, found: "GenAiFamily") -> Metric:
        points = [self._histogram_point(*series) for series in found.series]
        return Metric(found.name, found.text, found.unit, HistogramPoints(points, AggregationTemporality.CUMULATIVE))

    def family(self, family: Family) -> Iterator[Metric]:
        """Yield a family of ours; none of others, and none without samples."""
        if not family.name.startswith(_OURS):
            return
        if isinstance(family, BucketFamily):
            if family.rows:
                yield self._bucket_family(family)
            return
        parts = ("_count", "_sum") if family.type == "summary" else ("",)
        is_counter = family.type != "gauge"
        for part in parts:
            ending = "_total" if family.type == "counter" else part
            points = list(self._numbers(family, family.name + ending))
            if points:
                yield Metric(family.name + part, family.documentation, "", _numbers(points, is_counter=is_counter))

    def _numbers(self, family: Family, name: str) -> Iterable[NumberDataPoint]:
        for sample in family.samples:
            if sample.name == name:
                yield NumberDataPoint(dict(sample.labels), *self._times, float(sample.value))

    def _bucket_family(self, family: BucketFamily) -> Metric:
        points = [
            self._histogram_point(dict(zip(family.label_names, labels, strict=True)), histogram)
            for labels, histogram in family.rows
        ]
        data = HistogramPoints(points, AggregationTemporality.CUMULATIVE)
        return Metric(family.name, family.documentation, "", data)

    def _histogram_point(self, attributes: dict[str, str], found: Histogram) -> HistogramDataPoint:
        counted = [int(count) for count in found.counts]
        kept = [Exemplar({}, each.value, int(each.at * _NS), *_ids(each.labels)) for each in found.exemplars.values()]
        return HistogramDataPoint(
            attributes,
            *self._times,
            count=sum(counted),
            sum=found.total,
            bucket_counts=counted,
            explicit_bounds=list(found.bounds),
            min=None,  # type: ignore[arg-type]  # the message leaves it out then, which the protocol allows
            max=None,  # type: ignore[arg-type]
            exemplars=kept,
        )


def _ids(labels: Mapping[str, str]) -> tuple[int, int]:
    return int(labels["span_id"], 16), int(labels["trace_id"], 16)


def _numbers(points: list[NumberDataPoint], *, is_counter: bool) -> Sum | Gauge:
    return Sum(points, AggregationTemporality.CUMULATIVE, is_monotonic=True) if is_counter else Gauge(points)


# -- the metrics of the GenAI conventions, from the gateway's tallies


class GenAiFamily(NamedTuple):
    """A histogram of the conventions, with its series."""

    name: str
    text: str
    unit: str
    series: list[tuple[Attributes, Histogram]]


def genai_families(tallies: Tallies) -> Iterator[GenAiFamily]:
    """Yield the histograms of what the gateway has counted; their buckets are those of `sluice_*`."""
    found = {_attributes(*key): tally for key, tally in tallies.items()}
    yield GenAiFamily(
        "gen_ai.server.request.duration",
        "Generative AI server request duration such as time-to-last byte or last output token.",
        "s",
        [series for key, tally in found.items() for series in _durations(dict(key), tally)],
    )
    yield GenAiFamily(
        "gen_ai.server.time_to_first_token",
        "Time to generate first token for successful responses.",
        "s",
        [(dict(key), tally.time_to_first_token) for key, tally in found.items()],
    )
    yield GenAiFamily(
        "gen_ai.server.time_per_output_token",
        "Time per output token generated after the first token for successful responses.",
        "s",
        [(dict(key), tally.time_per_output_token) for key, tally in found.items()],
    )
    yield GenAiFamily(
        "gen_ai.client.token.usage",
        "Number of input and output tokens used.",
        "{token}",
        [series for key, tally in found.items() for series in _usage(dict(key), tally)],
    )


def _attributes(model: str, protocol: str) -> tuple[tuple[str, str], ...]:
    operation = "chat" if protocol in _CHATS else "text_completion"
    return (
        ("gen_ai.operation.name", operation),
        ("gen_ai.provider.name", "sluice"),
        ("gen_ai.request.model", model),
        ("gen_ai.response.model", model),
        ("sluice.protocol", protocol),
    )


def _durations(attributes: Attributes, tally: RequestTally) -> Iterable[tuple[Attributes, Histogram]]:
    """Yield the durations of requests that succeeded, and by error those of requests that did not."""
    succeeded = tally.request_duration.merged(())
    for failed in tally.failed_durations.values():
        succeeded.counts = list(map(sub, succeeded.counts, failed.counts))
        succeeded.total -= failed.total
    yield attributes, succeeded
    for outcome, failed in tally.failed_durations.items():
        yield {**attributes, "error.type": outcome}, failed


def _usage(attributes: Attributes, tally: RequestTally) -> Iterable[tuple[Attributes, Histogram]]:
    yield {**attributes, "gen_ai.token.type": "input"}, tally.prompt_length
    yield {**attributes, "gen_ai.token.type": "output"}, tally.output_length
