"""Latencies in three forms, as `--metrics-config` chooses: cumulative counters, summaries, histograms."""

from collections.abc import Callable, Iterator, Sequence
from time import perf_counter_ns
from typing import NamedTuple

from prometheus_client.core import Metric
from prometheus_client.utils import floatToGoString

from gateway.options.metrics_settings import Quantile
from gateway.telemetry.families import Labels, ModelFamily, Source, empty_family
from serving.latencies import FIRST_RESPONSE_FAMILY, Histogram, LatencySummaries, SlidingSketch
from serving.statistics import Duration, InferStatistics

_NS_PER_US = 1000

COUNTS = (
    ModelFamily(
        "nv_inference_request_duration_us",
        "Cumulative inference request duration in microseconds (includes cached requests)",
        lambda s: s.infer.success.ns // _NS_PER_US,
    ),
    ModelFamily(
        "nv_inference_queue_duration_us",
        "Cumulative inference queuing duration in microseconds (includes cached requests)",
        lambda s: s.infer.queue.ns // _NS_PER_US,
    ),
    ModelFamily(
        "nv_inference_compute_input_duration_us",
        "Cumulative compute input duration in microseconds (does not include cached requests)",
        lambda s: s.infer.compute_input.ns // _NS_PER_US,
    ),
    ModelFamily(
        "nv_inference_compute_infer_duration_us",
        "Cumulative compute inference duration in microseconds (does not include cached requests)",
        lambda s: s.infer.compute_infer.ns // _NS_PER_US,
    ),
    ModelFamily(
        "nv_inference_compute_output_duration_us",
        "Cumulative inference compute output duration in microseconds (does not include cached requests)",
        lambda s: s.infer.compute_output.ns // _NS_PER_US,
    ),
)


class _Summary(NamedTuple):
    """`sketch` gives the quantiles, `duration` the count and the sum since the model was loaded."""

    name: str
    text: str
    sketch: Callable[[LatencySummaries], SlidingSketch]
    duration: Callable[[InferStatistics], Duration]


_SUMMARIES = (
    _Summary(
        "nv_inference_request_summary_us",
        "Summary of inference request duration in microseconds (includes cached requests)",
        lambda sketches: sketches.request,
        lambda infer: infer.success,
    ),
    _Summary(
        "nv_inference_queue_summary_us",
        "Summary of inference queuing duration in microseconds (includes cached requests)",
        lambda sketches: sketches.queue,
        lambda infer: infer.queue,
    ),
    _Summary(
        "nv_inference_compute_input_summary_us",
        "Cumulative compute input duration in microseconds (does not include cached requests)",
        lambda sketches: sketches.compute_input,
        lambda infer: infer.compute_input,
    ),
    _Summary(
        "nv_inference_compute_infer_summary_us",
        "Cumulative compute inference duration in microseconds (does not include cached requests)",
        lambda sketches: sketches.compute_infer,
        lambda infer: infer.compute_infer,
    ),
    _Summary(
        "nv_inference_compute_output_summary_us",
        "Cumulative inference compute output duration in microseconds (does not include cached requests)",
        lambda sketches: sketches.compute_output,
        lambda infer: infer.compute_output,
    ),
)
_CACHE_SUMMARIES = (
    _Summary(
        "nv_cache_hit_summary_per_model",
        "Summary of cache hit counts/durations per model, in microseconds.",
        lambda sketches: sketches.cache_hit,
        lambda infer: infer.cache_hit,
    ),
    _Summary(
        "nv_cache_miss_summary_per_model",
        "Summary of cache miss counts/durations per model, in microseconds.",
        lambda sketches: sketches.cache_miss,
        lambda infer: infer.cache_miss,
    ),
)
NAMES = frozenset({FIRST_RESPONSE_FAMILY, *(each.name for each in (*COUNTS, *_SUMMARIES, *_CACHE_SUMMARIES))})
SAMPLE_NAMES = frozenset(f"{name}_{end}" for name in NAMES for end in ("bucket", "count", "sum"))


def latency_summaries(sources: Sequence[Source], quantiles: Sequence[Quantile]) -> Iterator[Metric]:
    """Of the models whose summaries are measured; those of the cache, of those that have one."""
    now = perf_counter_ns()
    for declared in _SUMMARIES:
        yield _summary(declared, sources, quantiles, now)
    cached = [source for source in sources if source.statistics.cache is not None]
    if cached:
        for declared in _CACHE_SUMMARIES:
            yield _summary(declared, cached, quantiles, now)


def _summary(declared: _Summary, sources: Sequence[Source], quantiles: Sequence[Quantile], now: int) -> Metric:
    made = empty_family(declared.name, declared.text, "summary")
    for labels, statistics in sources:
        recorder = statistics.latencies
        if recorder is None or recorder.summaries is None:
            continue
        duration = declared.duration(statistics.infer)
        made.add_sample(f"{declared.name}_count", labels, duration.count)
        made.add_sample(f"{declared.name}_sum", labels, duration.ns // _NS_PER_US)
        values = declared.sketch(recorder.summaries).quantiles([each.quantile for each in quantiles], now)
        for quantile, value in zip(quantiles, values, strict=True):
            made.add_sample(declared.name, {**labels, "quantile": quantile.label}, value)
    return made


def first_response_histogram(sources: Sequence[Source]) -> Metric:
    """Of the models of which it is measured."""
    made = empty_family(FIRST_RESPONSE_FAMILY, "Duration from request to first response in milliseconds", "histogram")
    for labels, statistics in sources:
        if statistics.latencies is not None and statistics.latencies.first_response_ms is not None:
            add_histogram(made, labels, statistics.latencies.first_response_ms)
    return made


def add_histogram(made: Metric, labels: Labels, histogram: Histogram) -> None:
    """Its samples as Prometheus has them."""
    cumulative = histogram.cumulative()
    for bound, count in cumulative:
        made.add_sample(f"{made.name}_bucket", {**labels, "le": _bound(bound)}, count)
    made.add_sample(f"{made.name}_count", labels, cumulative[-1][1])
    made.add_sample(f"{made.name}_sum", labels, histogram.total)


def _bound(value: float) -> str:
    return str(floatToGoString(value))  # type: ignore[no-untyped-call]
