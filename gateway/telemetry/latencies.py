"""Latencies in three forms, as `--metrics-config` chooses: cumulative counters, summaries, histograms."""

from collections.abc import Callable, Iterator, Sequence
from time import perf_counter_ns
from typing import NamedTuple

from prometheus_client.core import Metric

from sluice.gateway.options.telemetry import Quantile
from sluice.gateway.telemetry.families import ModelFamily, ModelSeries, add_histogram, empty_family
from sluice.serving.latencies import FIRST_RESPONSE_FAMILY, LatencySummaries, SlidingSketch
from sluice.serving.statistics import Duration, InferStatistics

_NS_PER_US = 1000

LATENCY_COUNTS = (
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
    """A summary: `sketch` has the quantiles, `duration` the count and the sum since the model was loaded."""

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
LATENCY_NAMES = frozenset(
    {FIRST_RESPONSE_FAMILY, *(each.name for each in (*LATENCY_COUNTS, *_SUMMARIES, *_CACHE_SUMMARIES))}
)
LATENCY_SAMPLE_NAMES = frozenset(f"{name}_{end}" for name in LATENCY_NAMES for end in ("bucket", "count", "sum"))


def latency_summaries(series: Sequence[ModelSeries], quantiles: Sequence[Quantile]) -> Iterator[Metric]:
    """Yield the summaries of the models that measure them; those of the cache for models that have one.

    Such models have no summary of whole requests, as in Triton: it would mix those that ran with those that did not.
    """
    now = perf_counter_ns()
    cached = [each for each in series if each.statistics.cache is not None]
    uncached = [each for each in series if each.statistics.cache is None]
    request, *others = _SUMMARIES
    if uncached or not cached:
        yield _summary(request, uncached, quantiles, now)
    for declared in others:
        yield _summary(declared, series, quantiles, now)
    if cached:
        for declared in _CACHE_SUMMARIES:
            yield _summary(declared, cached, quantiles, now)


def _summary(declared: _Summary, series: Sequence[ModelSeries], quantiles: Sequence[Quantile], now: int) -> Metric:
    made = empty_family(declared.name, declared.text, "summary")
    for labels, statistics in series:
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


def first_response_histogram(series: Sequence[ModelSeries]) -> Metric:
    made = empty_family(FIRST_RESPONSE_FAMILY, "Duration from request to first response in milliseconds", "histogram")
    for labels, statistics in series:
        if statistics.latencies is not None and statistics.latencies.first_response_ms is not None:
            add_histogram(made, labels, statistics.latencies.first_response_ms)
    return made
