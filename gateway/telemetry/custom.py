"""Metrics that models make: families by name, series by labels, each present while somebody holds it."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from math import inf

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from sluice.errors import ErrorCode, SluiceError
from sluice.gateway.telemetry.families import COUNTER, GAUGE, Labels, add_histogram, empty_family
from sluice.record.histogram import Histogram
from sluice.serving.backend import CustomMetric, CustomMetricFamily, CustomMetricKind

_NAME = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*", re.ASCII)
_LABEL = re.compile(r"(?!__)[a-zA-Z_][a-zA-Z0-9_]*", re.ASCII)
_TYPES = {CustomMetricKind.COUNTER: COUNTER, CustomMetricKind.GAUGE: GAUGE, CustomMetricKind.HISTOGRAM: "histogram"}

_LabelSet = tuple[tuple[str, str], ...]


class _Series:
    """The value of one set of labels: a number, or a histogram's counts."""

    __slots__ = ("histogram", "labels", "value")

    def __init__(self, labels: Labels, buckets: Sequence[float] | None) -> None:
        self.labels = labels
        self.value = 0.0
        self.histogram = None if buckets is None else Histogram(buckets)


class _Family:
    """A family that all holders of its name share. It stays until all have released it: a counter survives a reload."""

    def __init__(self, name: str, description: str, kind: CustomMetricKind) -> None:
        self.name = name
        self.description = description
        self.kind = kind
        self.series: dict[_LabelSet, _Series] = {}
        self.num_holders = 0

    def exposed(self) -> Metric:
        made = empty_family(self.name, self.description, _TYPES[self.kind])
        for series in self.series.values():
            if series.histogram is not None:
                add_histogram(made, series.labels, series.histogram)
            else:
                made.add_sample(self.name, series.labels, series.value)
        return made


class CustomMetricRegistry(Collector):
    """All custom families of a server; implements `CustomMetrics`. Event loop's thread only, the scrape too."""

    def __init__(self, is_reserved: Callable[[str], bool]) -> None:
        """`is_reserved` tells the names of the server's own families."""
        self._is_reserved = is_reserved
        self._families: dict[str, _Family] = {}

    def family(self, name: str, description: str, kind: CustomMetricKind) -> CustomMetricFamily:
        """Return the family of that name; the first holder sets the description.

        Raises SluiceError INVALID for a name that Prometheus does not accept, ALREADY_EXISTS for one of the server's
        own and for one that exists with another kind.
        """
        found = self._families.get(name)
        if found is None:
            self._check_name(name)
            found = self._families[name] = _Family(name, description, kind)
        elif found.kind is not kind:
            raise SluiceError(
                ErrorCode.ALREADY_EXISTS, f"metric family '{name}' is a {found.kind} already, and cannot be a {kind}"
            )
        return _FamilyHandle(self, found)

    def release(self, family: _Family) -> None:
        """Count one holder less; the last one deletes the family."""
        family.num_holders -= 1
        if family.num_holders == 0:
            del self._families[family.name]

    def _check_name(self, name: str) -> None:
        if _NAME.fullmatch(name) is None:
            raise SluiceError(ErrorCode.INVALID, f"'{name}' is no name for a metric family: [a-zA-Z_:][a-zA-Z0-9_:]*")
        if self._is_reserved(name):
            raise SluiceError(ErrorCode.ALREADY_EXISTS, f"metric family '{name}' is one of the server's own")

    def collect(self) -> Iterator[Metric]:
        """Yield the families that have series."""
        for family in self._families.values():
            if family.series:
                yield family.exposed()


class _FamilyHandle:
    """One holder's family."""

    def __init__(self, registry: CustomMetricRegistry, family: _Family) -> None:
        self._registry = registry
        self._family = family
        self._is_released = False
        family.num_holders += 1

    def metric(self, labels: Mapping[str, str], buckets: Sequence[float] | None = None) -> CustomMetric:
        if self._is_released:
            raise SluiceError(ErrorCode.INTERNAL, f"metric family '{self._family.name}' has been released")
        family = self._family
        _check_labels(labels, family.kind)
        _check_buckets(buckets, family.kind)
        key = tuple(sorted(labels.items()))
        series = family.series.get(key)
        if series is None:
            series = family.series[key] = _Series(dict(key), buckets)
        return _MetricHandle(family, series)

    def release(self) -> None:
        if not self._is_released:
            self._is_released = True
            self._registry.release(self._family)


class _MetricHandle:
    """One holder's series."""

    def __init__(self, family: _Family, series: _Series) -> None:
        self._family = family
        self._series = series
        self._is_released = False

    def increment(self, value: float) -> None:
        self._check("Increment", CustomMetricKind.COUNTER, CustomMetricKind.GAUGE)
        if self._family.kind is CustomMetricKind.COUNTER and not value >= 0:
            raise SluiceError(
                ErrorCode.INVALID,
                "TRITONSERVER_METRIC_KIND_COUNTER can only be incremented monotonically by non-negative values.",
            )
        self._series.value += value

    def set(self, value: float) -> None:
        self._check("Set", CustomMetricKind.GAUGE)
        self._series.value = value

    def observe(self, value: float) -> None:
        self._check("Observe", CustomMetricKind.HISTOGRAM)
        assert self._series.histogram is not None
        self._series.histogram.add(value)

    def value(self) -> float:
        self._check("Value", CustomMetricKind.COUNTER, CustomMetricKind.GAUGE)
        return self._series.value

    def _check(self, operation: str, *kinds: CustomMetricKind) -> None:
        if self._is_released:
            raise SluiceError(
                ErrorCode.INTERNAL, f"metric '{self._family.name}' has been released, {operation} is not possible"
            )
        kind = self._family.kind
        if kind not in kinds:
            reason = f"TRITONSERVER_METRIC_KIND_{kind.name} does not support {operation}"
            raise SluiceError(ErrorCode.UNIMPLEMENTED, reason)

    def release(self) -> None:
        self._is_released = True


def _check_labels(labels: Mapping[str, str], kind: CustomMetricKind) -> None:
    for name in labels:
        if _LABEL.fullmatch(name) is None or (name == "le" and kind is CustomMetricKind.HISTOGRAM):
            raise SluiceError(ErrorCode.INVALID, f"'{name}' is no name for a label of a {kind}")


def _check_buckets(buckets: Sequence[float] | None, kind: CustomMetricKind) -> None:
    if kind is not CustomMetricKind.HISTOGRAM:
        if buckets is not None:
            raise SluiceError(ErrorCode.INVALID, f"Unexpected args found in {kind} Metric constructor.")
        return
    if buckets is None:
        raise SluiceError(ErrorCode.INVALID, "Bucket boundaries not found in Metric args.")
    if not all(low < high for low, high in zip((-inf, *buckets), (*buckets, inf), strict=True)):
        raise SluiceError(ErrorCode.INVALID, "bucket boundaries must be finite and ascend")
