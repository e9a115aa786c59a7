"""Metrics of several workers as one: each worker says what it has counted, and the host adds it to its own."""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import msgspec
from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, Exemplar, GaugeMetricFamily, Metric

from sluice.gateway.telemetry.families import COUNTER, empty_family

_OF_ONE_PROCESS = ("process_", "python_", "nv_cpu_", "nv_gpu_", "nv_energy_")
_OF_ENGINES = "nv_trt_llm_"
"""How families begin that are of a process or its machine, and gauges of engines: the host has its own of them."""
_NOT_SUMMED = frozenset({"sluice_quota_store_up", "sluice_quota_used_ratio"})
"""Families that the host has for all."""
_CREATED = "_created"
_KEPT_KINDS = ("counter", "histogram", "summary")
"""Kinds of families whose values stay when a worker ends."""
SampleKey = tuple[str, tuple[tuple[str, str], ...]]


class Sample(msgspec.Struct, array_like=True, frozen=True):
    """One value of a family of metrics. `exemplar`: labels, value, and when it was, in seconds since 1970."""

    name: str
    labels: dict[str, str]
    value: float
    exemplar: tuple[dict[str, str], float, float] | None = None


class Family(msgspec.Struct, array_like=True, frozen=True):
    """A family of metrics, in Prometheus' words."""

    name: str
    help: str
    kind: str
    samples: list[Sample]


def read_counts(registry: CollectorRegistry) -> list[Family]:
    """Return what a worker has counted since its start."""
    return [
        Family(
            each.name,
            each.documentation,
            str(each.type),
            [
                Sample(s.name, dict(s.labels), float(s.value), _packed(s.exemplar))
                for s in each.samples
                if "quantile" not in s.labels  # nobody can add these
            ],
        )
        for each in registry.collect()
        if each.samples
        and not each.name.startswith(_OF_ONE_PROCESS)
        and not (each.type == "gauge" and each.name.startswith(_OF_ENGINES))
        and each.name not in _NOT_SUMMED
    ]


def _packed(exemplar: Exemplar | None) -> tuple[dict[str, str], float, float] | None:
    return None if exemplar is None else (exemplar.labels, exemplar.value, float(exemplar.timestamp or 0.0))


class _Sum(NamedTuple):
    help: str
    kind: str
    values: dict[SampleKey, float]
    exemplars: dict[SampleKey, Exemplar]
    """The latest exemplar of each value that has any."""


class WorkerCounts:
    """The counts of all workers, also of those that have ended."""

    def __init__(self) -> None:
        self._latest: dict[int, list[Family]] = {}
        self._ended: dict[str, _Sum] = {}

    def keep(self, worker: int, families: list[Family]) -> None:
        """Keep what a worker has counted since its start, in the place of what it said before."""
        self._latest[worker] = families

    def end(self, worker: int) -> None:
        """Add what a worker has counted to what others had that have ended. It has no gauges any more."""
        families = self._latest.pop(worker, [])
        _add(self._ended, (each for each in families if each.kind in _KEPT_KINDS))

    def sums(self) -> dict[str, _Sum]:
        """Return the sums by family."""
        sums = {
            name: each._replace(values=dict(each.values), exemplars=dict(each.exemplars))
            for name, each in self._ended.items()
        }
        for families in self._latest.values():
            _add(sums, families)
        return sums

    def families(self) -> list[Metric]:
        """Return the sums as families."""
        return [_family_of(name, each) for name, each in self.sums().items()]


def _add(sums: dict[str, _Sum], families: Iterable[Family]) -> None:
    for family in families:
        added = sums.setdefault(family.name, _Sum(family.help, family.kind, {}, {}))
        for sample in family.samples:
            key = sample.name, tuple(sorted(sample.labels.items()))
            added.values[key] = _combine(sample.name, added.values.get(key), sample.value)
            if sample.exemplar is not None:
                latest = _latest(added.exemplars.get(key), Exemplar(*sample.exemplar))
                assert latest is not None
                added.exemplars[key] = latest


def _latest(one: Exemplar | None, other: Exemplar | None) -> Exemplar | None:
    if one is None or other is None:
        return one or other
    return max(one, other, key=lambda each: float(each.timestamp or 0.0))


def _combine(name: str, before: float | None, value: float) -> float:
    if before is None:
        return value
    return min(before, value) if name.endswith(_CREATED) else before + value


class SummedRegistry(CollectorRegistry):
    """The host's registry with the workers' counts added to its own."""

    def __init__(self, own: CollectorRegistry, workers: WorkerCounts) -> None:
        super().__init__()
        self._own = own
        self._workers = workers

    def collect(self) -> Iterator[Metric]:
        sums = self._workers.sums()
        for metric in self._own.collect():
            added = sums.pop(metric.name, None)
            yield metric if added is None else _sum(metric, added)
        for name, added in sums.items():
            yield _family_of(name, added)


def worker_families(num_serving: int, num_lost: int) -> tuple[Metric, Metric]:
    """Return the families about the workers themselves."""
    serving = GaugeMetricFamily("sluice_http_workers", "HTTP workers that serve.")
    serving.add_metric((), num_serving)
    lost = CounterMetricFamily("sluice_http_worker_losses", "HTTP workers that crashed or hung, and were replaced.")
    lost.add_metric((), num_lost)
    return serving, lost


def _family_of(name: str, added: _Sum) -> Metric:
    is_bare = added.kind == "counter" and any(sample_name == name for sample_name, _ in added.values)
    return _sum(empty_family(name, added.help, COUNTER if is_bare else added.kind), added)


def _sum(metric: Metric, added: _Sum) -> Metric:
    result = empty_family(metric.name, metric.documentation, metric.type)
    left = dict(added.values)
    for sample in metric.samples:
        key = sample.name, tuple(sorted(sample.labels.items()))
        value = _combine(sample.name, left.pop(key, None), sample.value)
        exemplar = _latest(sample.exemplar, added.exemplars.get(key))
        result.add_sample(sample.name, sample.labels, value, sample.timestamp, exemplar)
    for (name, labels), value in left.items():
        result.add_sample(name, dict(labels), value, None, added.exemplars.get((name, labels)))
    return result
