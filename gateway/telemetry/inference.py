"""Triton's own metrics: the nv_inference families of every loaded model, by Triton's names."""

from collections.abc import Callable, Iterable, Iterator

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from gateway.telemetry.host import CpuUtilization, host_memory
from pipelines.inference.model import Model
from pipelines.inference.statistics import CacheUsage, FailureReason, ModelStatistics

_NS_PER_US = 1000

Read = Callable[[ModelStatistics], float]

_COUNTERS: tuple[tuple[str, str, Read], ...] = (
    (
        "nv_inference_request_success",
        "Number of successful inference requests, all batch sizes",
        lambda s: s.infer.success.count,
    ),
    (
        "nv_inference_count",
        "Number of inferences performed (does not include cached requests)",
        lambda s: s.inference_count,
    ),
    (
        "nv_inference_exec_count",
        "Number of model executions performed (does not include cached requests)",
        lambda s: s.execution_count,
    ),
    (
        "nv_inference_request_duration_us",
        "Cumulative inference request duration in microseconds (includes cached requests)",
        lambda s: s.infer.success.ns // _NS_PER_US,
    ),
    (
        "nv_inference_queue_duration_us",
        "Cumulative inference queuing duration in microseconds (includes cached requests)",
        lambda s: s.infer.queue.ns // _NS_PER_US,
    ),
    (
        "nv_inference_compute_input_duration_us",
        "Cumulative compute input duration in microseconds (does not include cached requests)",
        lambda s: s.infer.compute_input.ns // _NS_PER_US,
    ),
    (
        "nv_inference_compute_infer_duration_us",
        "Cumulative compute inference duration in microseconds (does not include cached requests)",
        lambda s: s.infer.compute_infer.ns // _NS_PER_US,
    ),
    (
        "nv_inference_compute_output_duration_us",
        "Cumulative inference compute output duration in microseconds (does not include cached requests)",
        lambda s: s.infer.compute_output.ns // _NS_PER_US,
    ),
)
_CACHE_COUNTERS: tuple[tuple[str, str, Read], ...] = (
    ("nv_cache_num_hits_per_model", "Number of cache hits per model", lambda s: s.infer.cache_hit.count),
    (
        "nv_cache_hit_duration_per_model",
        "Total cache hit duration per model, in microseconds",
        lambda s: s.infer.cache_hit.ns // _NS_PER_US,
    ),
    ("nv_cache_num_misses_per_model", "Number of cache misses per model", lambda s: s.infer.cache_miss.count),
    (
        "nv_cache_miss_duration_per_model",
        "Total cache miss (insert+lookup) duration per model, in microseconds",
        lambda s: s.infer.cache_miss.ns // _NS_PER_US,
    ),
)


_CACHE_GAUGES: tuple[tuple[str, str, Callable[[CacheUsage], float]], ...] = (
    ("nv_cache_num_entries", "Number of responses stored in response cache", lambda c: c.num_entries),
    ("nv_cache_num_hits", "Number of cache hits in response cache", lambda c: c.num_hits),
    ("nv_cache_num_misses", "Number of cache misses in response cache", lambda c: c.num_misses),
    ("nv_cache_num_lookups", "Number of cache lookups in response cache", lambda c: c.num_hits + c.num_misses),
    ("nv_cache_num_evictions", "Number of cache evictions in response cache", lambda c: c.num_evictions),
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


class _CounterType(str):
    """The word "counter", which the library does not recognize.

    For counters that it does recognize it names the family `…_total`; Triton's have no such ending, and the
    dashboards made for them ask for the bare names.
    """

    __slots__ = ()
    __hash__ = str.__hash__

    def __eq__(self, other: object) -> bool:
        return self is other


_COUNTER = _CounterType("counter")


class InferenceCollector(Collector):
    """Families of the models there are when somebody scrapes. To be scraped on the event loop's thread."""

    def __init__(self, models: Callable[[], Iterable[Model]]) -> None:
        self._models = models
        self._cpu = CpuUtilization()

    def collect(self) -> Iterator[Metric]:
        models = [(_labels(model), model.statistics) for model in self._models()]
        cached = [(labels, statistics) for labels, statistics in models if statistics.cache is not None]
        for name, text, read in _COUNTERS:
            yield _family(name, text, _COUNTER, ((labels, read(statistics)) for labels, statistics in models))
            if name == "nv_inference_request_success":
                yield _failures(models)
        if cached:
            for name, text, read in _CACHE_COUNTERS:
                yield _family(name, text, _COUNTER, ((labels, read(statistics)) for labels, statistics in cached))
        yield _family(
            "nv_inference_pending_request_count",
            "Instantaneous number of pending requests awaiting execution per-model.",
            "gauge",
            ((labels, statistics.count_pending()) for labels, statistics in models),
        )
        yield from self._host()
        yield from _caches([statistics.cache for _, statistics in models if statistics.cache is not None])

    def _host(self) -> Iterator[Metric]:
        utilization, memory = self._cpu.sample(), host_memory()
        if utilization is not None:
            yield GaugeMetricFamily("nv_cpu_utilization", "CPU utilization rate [0.0 - 1.0]", utilization)
        if memory is not None:
            yield GaugeMetricFamily("nv_cpu_memory_total_bytes", "CPU total memory (RAM), in bytes", memory.total_bytes)
            yield GaugeMetricFamily("nv_cpu_memory_used_bytes", "CPU used memory (RAM), in bytes", memory.used_bytes)


Labels = dict[str, str]


def _labels(model: Model) -> Labels:
    """A model's, with the tags that its configuration adds."""
    return {**model.config.metric_tags, "model": model.name, "version": str(model.spec.version)}


def _family(name: str, text: str, kind: str, values: Iterable[tuple[Labels, float]]) -> Metric:
    family = Metric(name, text, "unknown")
    family.type = kind
    for labels, value in values:
        family.add_sample(name, labels, value)
    return family


def _failures(models: list[tuple[Labels, ModelStatistics]]) -> Metric:
    return _family(
        "nv_inference_request_failure",
        "Number of failed inference requests, all batch sizes",
        _COUNTER,
        (
            ({**labels, "reason": reason.value}, statistics.failures[reason])
            for labels, statistics in models
            for reason in FailureReason
        ),
    )


def _caches(caches: list[CacheUsage]) -> Iterator[Metric]:
    """Of all caches together, where there are any."""
    if not caches:
        return
    used, size = sum(each.used_bytes for each in caches), sum(each.size_bytes for each in caches)
    yield GaugeMetricFamily("nv_cache_util", "Cache utilization [0.0 - 1.0]", used / size)
    for name, text, read in _CACHE_GAUGES:
        yield GaugeMetricFamily(name, text, sum(read(each) for each in caches))
