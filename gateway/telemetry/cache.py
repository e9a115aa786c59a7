"""Families of response caches: one value for each model that has a cache, and one for all caches together."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from sluice.gateway.telemetry.families import COUNTER, ModelFamily, ModelSeries, build_model_family
from sluice.serving.statistics import CacheUsage

_NS_PER_US = 1000
_COUNTS = (
    ModelFamily("nv_cache_num_hits_per_model", "Number of cache hits per model", lambda s: s.infer.cache_hit.count),
    ModelFamily(
        "nv_cache_hit_duration_per_model",
        "Total cache hit duration per model, in microseconds",
        lambda s: s.infer.cache_hit.ns // _NS_PER_US,
    ),
    ModelFamily(
        "nv_cache_num_misses_per_model", "Number of cache misses per model", lambda s: s.infer.cache_miss.count
    ),
    ModelFamily(
        "nv_cache_miss_duration_per_model",
        "Total cache miss (insert+lookup) duration per model, in microseconds",
        lambda s: s.infer.cache_miss.ns // _NS_PER_US,
    ),
)


class _Gauge(NamedTuple):
    name: str
    text: str
    read: Callable[[CacheUsage], float]


_CONTENTS = (_Gauge("nv_cache_num_entries", "Number of responses stored in response cache", lambda c: c.num_entries),)
_EVICTIONS = (
    _Gauge("nv_cache_num_evictions", "Number of cache evictions in response cache", lambda c: c.num_evictions),
)
_LOOKUPS = (
    _Gauge("nv_cache_num_hits", "Number of cache hits in response cache", lambda c: c.num_hits),
    _Gauge("nv_cache_num_misses", "Number of cache misses in response cache", lambda c: c.num_misses),
    _Gauge("nv_cache_num_lookups", "Number of cache lookups in response cache", lambda c: c.num_hits + c.num_misses),
)
_DURATIONS = (
    _Gauge(
        "nv_cache_lookup_duration",
        "Total cache lookup duration (hit and miss), in microseconds",
        lambda c: c.lookup_ns // _NS_PER_US,
    ),
    _Gauge(
        "nv_cache_insertion_duration",
        "Total cache insertion duration, in microseconds",
        lambda c: c.insertion_ns // _NS_PER_US,
    ),
)
_UTILIZATION = "nv_cache_util"
CACHE_NAMES = frozenset(
    {_UTILIZATION, *(each.name for each in (*_COUNTS, *_CONTENTS, *_EVICTIONS, *_LOOKUPS, *_DURATIONS))}
)


def cache_counters(series: Iterable[ModelSeries]) -> Iterator[Metric]:
    cached = [each for each in series if each.statistics.cache is not None]
    if cached:
        for declared in _COUNTS:
            yield build_model_family(declared, COUNTER, cached)


def cache_gauges(usages: Iterable[CacheUsage]) -> Iterator[Metric]:
    """Yield the sums over all caches, where there are any. A remote cache's server reports its contents."""
    caches = list({id(usage): usage for usage in usages}.values())
    local = [usage for usage in caches if usage.size_bytes is not None]
    remote = [usage for usage in caches if usage.size_bytes is None]
    if local:
        size, used = sum(usage.size_bytes or 0 for usage in local), sum(usage.used_bytes for usage in local)
        yield GaugeMetricFamily(_UTILIZATION, "Cache utilization [0.0 - 1.0]", used / size)
        yield from _summed(_CONTENTS, local)
    if caches:
        yield from _summed(_LOOKUPS, caches)
    if local:
        yield from _summed(_EVICTIONS, local)
    if caches:
        yield from _summed(_DURATIONS, caches)
    if remote:
        yield from _health(remote)


def _summed(gauges: Sequence[_Gauge], usages: Sequence[CacheUsage]) -> Iterator[Metric]:
    for gauge in gauges:
        yield GaugeMetricFamily(gauge.name, gauge.text, sum(gauge.read(usage) for usage in usages))


def _health(remote: Sequence[CacheUsage]) -> Iterator[Metric]:
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
