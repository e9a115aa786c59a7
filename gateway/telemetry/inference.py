"""Triton's own metrics: the families of the loaded models, of the caches and of the machine, by Triton's names."""

from collections.abc import Callable, Iterable, Iterator, Sequence

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from gateway.options.metrics_settings import MetricsSettings
from gateway.telemetry import latencies
from gateway.telemetry.aliases import alias_families
from gateway.telemetry.cache import cache_counters, cache_gauges
from gateway.telemetry.families import COUNTER, GAUGE, ModelFamily, Source, family, model_family, source_of
from gateway.telemetry.gpu import GpuSample, gpu_families
from gateway.telemetry.gpu_processes import engine_pids, process_memory
from gateway.telemetry.host import HostMetrics
from serving.model import Model
from serving.statistics import CacheUsage, FailureReason

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
NAMES = frozenset({_FAILURES, _PINNED_TOTAL, _PINNED_USED, *(each.name for each in (_SUCCESSES, *_COUNTS, _PENDING))})


def _no_gpus() -> Sequence[GpuSample]:
    return ()


class InferenceCollector(Collector):
    """Families of the models there are when somebody scrapes. To be scraped on the event loop's thread."""

    def __init__(
        self,
        models: Callable[[], Iterable[Model]],
        settings: MetricsSettings | None = None,
        cache: CacheUsage | None = None,
        gpus: Callable[[], Sequence[GpuSample]] = _no_gpus,
    ) -> None:
        """`cache`: of the server's, which is shown whether or not a model that uses it is loaded."""
        self._models = models
        self._settings = settings or MetricsSettings()
        self._cache = cache
        self._gpus = gpus
        self._host = HostMetrics(self._settings.interval_s) if self._settings.allows_cpu else None

    def collect(self) -> Iterator[Metric]:
        models = list(self._models())
        sources = [source_of(model) for model in models]
        gpus = self._gpus()
        yield from self._of_models(sources)
        yield from _pinned_memory()
        yield from gpu_families(gpus)
        yield from process_memory([(gpu.uuid, gpu.processes) for gpu in gpus], engine_pids(models))
        if self._host is not None:
            yield from self._host.families()
        own = [source.statistics.cache for source in sources]
        yield from cache_gauges(usage for usage in (self._cache, *own) if usage is not None)
        if self._settings.has_triton_infer_aliases:
            yield from alias_families(sources, gpus)

    def _of_models(self, sources: list[Source]) -> Iterator[Metric]:
        settings = self._settings
        yield model_family(_SUCCESSES, COUNTER, sources)
        yield _failures(sources)
        counted = (*_COUNTS, *latencies.COUNTS) if settings.has_counters else _COUNTS
        for declared in counted:
            yield model_family(declared, COUNTER, sources)
        if settings.has_counters:
            yield from cache_counters(sources)
        yield model_family(_PENDING, GAUGE, sources)
        if settings.has_histograms:
            yield latencies.first_response_histogram(sources)
        if settings.has_summaries:
            yield from latencies.latency_summaries(sources, settings.quantiles)


def _failures(sources: Iterable[Source]) -> Metric:
    return family(
        _FAILURES,
        "Number of failed inference requests, all batch sizes",
        COUNTER,
        (
            ({**labels, "reason": reason.value}, statistics.failures[reason])
            for labels, statistics in sources
            for reason in FailureReason
        ),
    )


def _pinned_memory() -> Iterator[Metric]:
    """There is no such pool: dashboards made for Triton find one of no size instead of a hole."""
    yield GaugeMetricFamily(_PINNED_TOTAL, "Pinned memory pool total memory size, in bytes", 0)
    yield GaugeMetricFamily(_PINNED_USED, "Pinned memory pool used memory size, in bytes", 0)
