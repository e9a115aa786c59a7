"""The metrics page but for the gateway's and the engines' own counts: Triton's families, and those that models make."""

import asyncio
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from time import perf_counter_ns
from typing import NamedTuple

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from sluice.gateway.options.telemetry import MetricsSettings, Quantile
from sluice.gateway.telemetry.aliases import ALIAS_NAMES
from sluice.gateway.telemetry.custom import CustomMetricRegistry
from sluice.gateway.telemetry.families import (
    COUNTER,
    GAUGE,
    ModelFamily,
    ModelSeries,
    add_histogram,
    build_family,
    build_model_family,
    empty_family,
    model_series,
)
from sluice.gateway.telemetry.machine import (
    MACHINE_NAMES,
    GpuSample,
    GpuSampler,
    HostMetrics,
    engine_pids,
    gpu_families,
    gpu_values,
    process_memory,
)
from sluice.gateway.telemetry.trt_llm import TRT_LLM_NAMES, TRT_LLM_SAMPLE_NAMES, TrtLlmCollector
from sluice.serving.latencies import FIRST_RESPONSE_FAMILY, LatencyOptions
from sluice.serving.model import Model
from sluice.serving.statistics import CacheUsage, Duration, FailureReason, ModelStatistics

_SUCCESSES = ModelFamily(
    "nv_inference_request_success",
    "Number of successful inference requests, all batch sizes",
    lambda s: s.infer.success.count,
)
_COUNTS = (
    ModelFamily(
        "nv_inference_count",
        "Number of inferences performed (does not include cached requests)",
        lambda s: s.inference_count,
    ),
    ModelFamily(
        "nv_inference_exec_count",
        "Number of model executions performed (does not include cached requests)",
        lambda s: s.execution_count,
    ),
)
_PENDING = ModelFamily(
    "nv_inference_pending_request_count",
    "Instantaneous number of pending requests awaiting execution per-model.",
    lambda s: s.count_pending(),
)
_FAILURES = "nv_inference_request_failure"
_PINNED_TOTAL, _PINNED_USED = "nv_pinned_memory_pool_total_bytes", "nv_pinned_memory_pool_used_bytes"
_NS_PER_US = 1000


def _microseconds(duration: str, statistics: ModelStatistics) -> int:
    found: Duration = getattr(statistics.infer, duration)
    return found.ns // _NS_PER_US


def _compute_us(statistics: ModelStatistics) -> int:
    infer = statistics.infer
    return (infer.compute_input.ns + infer.compute_infer.ns + infer.compute_output.ns) // _NS_PER_US


_ALIASES = (
    ModelFamily(
        "triton_infer_request_duration_us",
        "The same as nv_inference_request_duration_us",
        partial(_microseconds, "success"),
    ),
    ModelFamily(
        "triton_infer_queue_duration_us",
        "The same as nv_inference_queue_duration_us",
        partial(_microseconds, "queue"),
    ),
    ModelFamily(
        "triton_infer_compute_duration_us",
        "nv_inference_compute_input_duration_us, _infer_ and _output_ together",
        _compute_us,
    ),
    ModelFamily(
        "triton_infer_total_request_count",
        "nv_inference_request_success and nv_inference_request_failure together",
        lambda s: s.infer.success.count + s.infer.fail.count,
    ),
    ModelFamily(
        "triton_infer_success_count", "The same as nv_inference_request_success", lambda s: s.infer.success.count
    ),
    ModelFamily(
        "triton_infer_failure_count",
        "nv_inference_request_failure of all reasons together",
        lambda s: s.infer.fail.count,
    ),
)
_GPU_ALIAS = "triton_gpu_utilization"


class _Summary(NamedTuple):
    """A summary: `sketch` of `LatencySummaries` has the quantiles, `duration` of `InferStatistics` the count and the
    sum since the model was loaded."""

    name: str
    text: str
    sketch: str
    duration: str


_WITH, _WITHOUT = "(includes cached requests)", "(does not include cached requests)"
_TIMES = (
    ("request", "success", "Summary of", f"inference request duration in microseconds {_WITH}"),
    ("queue", "queue", "Summary of", f"inference queuing duration in microseconds {_WITH}"),
    ("compute_input", "compute_input", "Cumulative", f"compute input duration in microseconds {_WITHOUT}"),
    ("compute_infer", "compute_infer", "Cumulative", f"compute inference duration in microseconds {_WITHOUT}"),
    ("compute_output", "compute_output", "Cumulative", f"inference compute output duration in microseconds {_WITHOUT}"),
)
"""Parts of the time of requests: their names, their durations in `InferStatistics`, how the text of their summaries
begins in Triton, and the rest of both texts."""
_LATENCY_COUNTS = tuple(
    ModelFamily(f"nv_inference_{part}_duration_us", f"Cumulative {text}", partial(_microseconds, duration))
    for part, duration, _, text in _TIMES
)
_SUMMARIES = tuple(
    _Summary(f"nv_inference_{part}_summary_us", f"{begin} {text}", part, duration)
    for part, duration, begin, text in _TIMES
)
_CACHE_SUMMARIES = tuple(
    _Summary(
        f"nv_cache_{found}_summary_per_model",
        f"Summary of cache {found} counts/durations per model, in microseconds.",
        f"cache_{found}",
        f"cache_{found}",
    )
    for found in ("hit", "miss")
)
_LATENCY_NAMES = frozenset(
    {
        FIRST_RESPONSE_FAMILY,
        *(each.name for each in _LATENCY_COUNTS),
        *(each.name for each in (*_SUMMARIES, *_CACHE_SUMMARIES)),
    }
)
_CACHE_COUNTS = (
    ModelFamily("nv_cache_num_hits_per_model", "Number of cache hits per model", lambda s: s.infer.cache_hit.count),
    ModelFamily(
        "nv_cache_hit_duration_per_model",
        "Total cache hit duration per model, in microseconds",
        partial(_microseconds, "cache_hit"),
    ),
    ModelFamily(
        "nv_cache_num_misses_per_model", "Number of cache misses per model", lambda s: s.infer.cache_miss.count
    ),
    ModelFamily(
        "nv_cache_miss_duration_per_model",
        "Total cache miss (insert+lookup) duration per model, in microseconds",
        partial(_microseconds, "cache_miss"),
    ),
)
_CacheGauge = tuple[str, str, Callable[[CacheUsage], float]]
_CACHE_CONTENTS: _CacheGauge = (
    "nv_cache_num_entries",
    "Number of responses stored in response cache",
    lambda c: c.num_entries,
)
_CACHE_EVICTIONS: _CacheGauge = (
    "nv_cache_num_evictions",
    "Number of cache evictions in response cache",
    lambda c: c.num_evictions,
)
_CACHE_LOOKUPS: tuple[_CacheGauge, ...] = (
    ("nv_cache_num_hits", "Number of cache hits in response cache", lambda c: c.num_hits),
    ("nv_cache_num_misses", "Number of cache misses in response cache", lambda c: c.num_misses),
    ("nv_cache_num_lookups", "Number of cache lookups in response cache", lambda c: c.num_hits + c.num_misses),
)
_CACHE_DURATIONS: tuple[_CacheGauge, ...] = (
    (
        "nv_cache_lookup_duration",
        "Total cache lookup duration (hit and miss), in microseconds",
        lambda c: c.lookup_ns // _NS_PER_US,
    ),
    (
        "nv_cache_insertion_duration",
        "Total cache insertion duration, in microseconds",
        lambda c: c.insertion_ns // _NS_PER_US,
    ),
)
_CACHE_UTILIZATION = "nv_cache_util"
_OWN_NAMES = frozenset(
    {
        *(_FAILURES, _PINNED_TOTAL, _PINNED_USED, _GPU_ALIAS),
        *(each.name for each in (_SUCCESSES, *_COUNTS, _PENDING, *_ALIASES)),
        *(_CACHE_UTILIZATION, *(each.name for each in _CACHE_COUNTS)),
        *(name for name, _, _ in (_CACHE_CONTENTS, *_CACHE_LOOKUPS, _CACHE_EVICTIONS, *_CACHE_DURATIONS)),
        *(*MACHINE_NAMES, *_LATENCY_NAMES),
        *(f"{name}_{end}" for name in _LATENCY_NAMES for end in ("bucket", "count", "sum")),
        *(*TRT_LLM_NAMES, *TRT_LLM_SAMPLE_NAMES, *ALIAS_NAMES),
    }
)
"""Families of the server, and samples of its histograms and summaries, whether or not they are shown."""
_OWN_PREFIXES = ("sluice_", "process_")


class MetricsPage:
    """Registers Triton's families and those of models in `registry`, and samples the GPUs until `close`."""

    def __init__(
        self,
        registry: CollectorRegistry,
        models: Callable[[], Iterable[Model]],
        settings: MetricsSettings,
        cache: CacheUsage | None = None,
    ) -> None:
        """`models` is called at each scrape. `cache` is the usage of the server's response cache, where it has one."""
        self.custom = CustomMetricRegistry(is_reserved_name)
        self._gpus = GpuSampler(settings.interval_s)
        if settings.is_allowed:
            registry.register(InferenceCollector(models, settings, cache, lambda: self._gpus.samples))
            registry.register(TrtLlmCollector(models))
            registry.register(self.custom)
        if settings.allows_gpu:
            self._gpus.start()

    async def close(self) -> None:
        """End the sampling of GPUs. Idempotent."""
        await asyncio.to_thread(self._gpus.close)


def latency_options(settings: MetricsSettings) -> LatencyOptions:
    """Return the measurements that every model must make for the page."""
    if not settings.is_allowed:
        return LatencyOptions()
    return LatencyOptions(settings.has_summaries, settings.has_histograms)


def is_reserved_name(name: str) -> bool:
    """Whether `name` is the server's own, so that no model may make a family of that name."""
    return name in _OWN_NAMES or name.startswith(_OWN_PREFIXES)


class InferenceCollector(Collector):
    """Collects the families of the models that are loaded at the scrape, on the event loop's thread."""

    def __init__(
        self,
        models: Callable[[], Iterable[Model]],
        settings: MetricsSettings | None = None,
        cache: CacheUsage | None = None,
        gpus: Callable[[], Sequence[GpuSample]] = lambda: (),
    ) -> None:
        """`cache` is the usage of the server's cache, which is shown whether or not a loaded model uses it."""
        self._models = models
        self._settings = settings or MetricsSettings()
        self._cache = cache
        self._gpus = gpus
        self._host = HostMetrics(self._settings.interval_s) if self._settings.allows_cpu else None

    def collect(self) -> Iterator[Metric]:
        models = list(self._models())
        series = [model_series(model) for model in models]
        gpus = self._gpus()
        yield from self._model_families(series)
        # A pool of no size: dashboards made for Triton would otherwise show a gap.
        yield GaugeMetricFamily(_PINNED_TOTAL, "Pinned memory pool total memory size, in bytes", 0)
        yield GaugeMetricFamily(_PINNED_USED, "Pinned memory pool used memory size, in bytes", 0)
        yield from gpu_families(gpus)
        yield from process_memory([(gpu.uuid, gpu.processes) for gpu in gpus], engine_pids(models))
        if self._host is not None:
            yield from self._host.families()
        own = [each.statistics.cache for each in series]
        yield from _cache_gauges(usage for usage in (self._cache, *own) if usage is not None)
        if self._settings.has_triton_infer_aliases:
            yield from alias_families(series, gpus)

    def _model_families(self, series: list[ModelSeries]) -> Iterator[Metric]:
        settings = self._settings
        yield build_model_family(_SUCCESSES, COUNTER, series)
        yield _failures(series)
        counted = (*_COUNTS, *_LATENCY_COUNTS) if settings.has_counters else _COUNTS
        for declared in counted:
            yield build_model_family(declared, COUNTER, series)
        if settings.has_counters:
            yield from _cache_counters(series)
        yield build_model_family(_PENDING, GAUGE, series)
        if settings.has_histograms:
            yield _first_response_histogram(series)
        if settings.has_summaries:
            yield from _latency_summaries(series, settings.quantiles)


def _failures(series: Iterable[ModelSeries]) -> Metric:
    return build_family(
        _FAILURES,
        "Number of failed inference requests, all batch sizes",
        COUNTER,
        (
            ({**labels, "reason": reason.value}, statistics.failures[reason])
            for labels, statistics in series
            for reason in FailureReason
        ),
    )


def alias_families(series: Sequence[ModelSeries], gpus: Sequence[GpuSample]) -> Iterator[Metric]:
    """Yield the families by names that some guides give them (`--metrics-config triton_infer_aliases=true`)."""
    for declared in _ALIASES:
        yield build_model_family(declared, COUNTER, series)
    if gpus:
        percent = gpu_values(gpus, lambda gpu: None if gpu.utilization is None else gpu.utilization * 100)
        yield build_family(_GPU_ALIAS, "nv_gpu_utilization in percent", GAUGE, percent)


def _latency_summaries(series: Sequence[ModelSeries], quantiles: Sequence[Quantile]) -> Iterator[Metric]:
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
        duration: Duration = getattr(statistics.infer, declared.duration)
        made.add_sample(f"{declared.name}_count", labels, duration.count)
        made.add_sample(f"{declared.name}_sum", labels, duration.ns // _NS_PER_US)
        values = getattr(recorder.summaries, declared.sketch).quantiles([each.quantile for each in quantiles], now)
        for quantile, value in zip(quantiles, values, strict=True):
            made.add_sample(declared.name, {**labels, "quantile": quantile.label}, value)
    return made


def _first_response_histogram(series: Sequence[ModelSeries]) -> Metric:
    made = empty_family(FIRST_RESPONSE_FAMILY, "Duration from request to first response in milliseconds", "histogram")
    for labels, statistics in series:
        if statistics.latencies is not None and statistics.latencies.first_response_ms is not None:
            add_histogram(made, labels, statistics.latencies.first_response_ms)
    return made


def _cache_counters(series: Iterable[ModelSeries]) -> Iterator[Metric]:
    cached = [each for each in series if each.statistics.cache is not None]
    if cached:
        for declared in _CACHE_COUNTS:
            yield build_model_family(declared, COUNTER, cached)


def _cache_gauges(usages: Iterable[CacheUsage]) -> Iterator[Metric]:
    """Yield the sums over all caches, where there are any. A remote cache's server reports its contents."""
    caches = list({id(usage): usage for usage in usages}.values())
    local = [usage for usage in caches if usage.size_bytes is not None]
    remote = [usage for usage in caches if usage.size_bytes is None]
    if local:
        size, used = sum(usage.size_bytes or 0 for usage in local), sum(usage.used_bytes for usage in local)
        yield GaugeMetricFamily(_CACHE_UTILIZATION, "Cache utilization [0.0 - 1.0]", used / size)
        yield from _summed((_CACHE_CONTENTS,), local)
    if caches:
        yield from _summed(_CACHE_LOOKUPS, caches)
    if local:
        yield from _summed((_CACHE_EVICTIONS,), local)
    if caches:
        yield from _summed(_CACHE_DURATIONS, caches)
    if remote:
        yield from _cache_health(remote)


def _summed(gauges: Sequence[_CacheGauge], usages: Sequence[CacheUsage]) -> Iterator[Metric]:
    for name, text, read in gauges:
        yield GaugeMetricFamily(name, text, sum(map(read, usages)))


def _cache_health(remote: Sequence[CacheUsage]) -> Iterator[Metric]:
    yield GaugeMetricFamily(
        "sluice_response_cache_up",
        "1 while the response cache in another process answers; at 0 requests are served without it.",
        min(usage.is_up for usage in remote),
    )
    yield CounterMetricFamily(
        "sluice_response_cache_errors",
        "Commands to the response cache that failed or took too long.",
        sum(usage.num_errors for usage in remote),
    )
    yield CounterMetricFamily(
        "sluice_response_cache_bypassed",
        "Requests that were served without a look-up, as the response cache did not answer.",
        sum(usage.num_bypassed for usage in remote),
    )
