"""The metrics page but for the gateway's and the engines' own counts: Triton's families, and those that models make."""

import asyncio
from collections.abc import Callable, Iterable, Iterator, Sequence

from prometheus_client import CollectorRegistry
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from sluice.gateway.options.telemetry import MetricsSettings
from sluice.gateway.telemetry.aliases import ALIAS_NAMES
from sluice.gateway.telemetry.cache import CACHE_NAMES, cache_counters, cache_gauges
from sluice.gateway.telemetry.custom import CustomMetricRegistry
from sluice.gateway.telemetry.families import (
    COUNTER,
    GAUGE,
    ModelFamily,
    ModelSeries,
    build_family,
    build_model_family,
    model_series,
)
from sluice.gateway.telemetry.latencies import (
    LATENCY_COUNTS,
    LATENCY_NAMES,
    LATENCY_SAMPLE_NAMES,
    first_response_histogram,
    latency_summaries,
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
from sluice.serving.latencies import LatencyOptions
from sluice.serving.model import Model
from sluice.serving.statistics import CacheUsage, FailureReason, ModelStatistics

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


def _compute_us(statistics: ModelStatistics) -> int:
    infer = statistics.infer
    return (infer.compute_input.ns + infer.compute_infer.ns + infer.compute_output.ns) // _NS_PER_US


_ALIASES = (
    ModelFamily(
        "triton_infer_request_duration_us",
        "The same as nv_inference_request_duration_us",
        lambda s: s.infer.success.ns // _NS_PER_US,
    ),
    ModelFamily(
        "triton_infer_queue_duration_us",
        "The same as nv_inference_queue_duration_us",
        lambda s: s.infer.queue.ns // _NS_PER_US,
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
_OWN_NAMES = frozenset(
    {
        *(_FAILURES, _PINNED_TOTAL, _PINNED_USED, _GPU_ALIAS),
        *(each.name for each in (_SUCCESSES, *_COUNTS, _PENDING, *_ALIASES)),
        *(*CACHE_NAMES, *MACHINE_NAMES),
        *(*LATENCY_NAMES, *LATENCY_SAMPLE_NAMES),
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
        yield from cache_gauges(usage for usage in (self._cache, *own) if usage is not None)
        if self._settings.has_triton_infer_aliases:
            yield from alias_families(series, gpus)

    def _model_families(self, series: list[ModelSeries]) -> Iterator[Metric]:
        settings = self._settings
        yield build_model_family(_SUCCESSES, COUNTER, series)
        yield _failures(series)
        counted = (*_COUNTS, *LATENCY_COUNTS) if settings.has_counters else _COUNTS
        for declared in counted:
            yield build_model_family(declared, COUNTER, series)
        if settings.has_counters:
            yield from cache_counters(series)
        yield build_model_family(_PENDING, GAUGE, series)
        if settings.has_histograms:
            yield first_response_histogram(series)
        if settings.has_summaries:
            yield from latency_summaries(series, settings.quantiles)


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
