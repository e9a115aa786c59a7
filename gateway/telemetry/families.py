"""Metric families made by hand, under Triton's names, some of which Prometheus' library would change."""

from collections.abc import Callable, Iterable
from typing import NamedTuple

from prometheus_client.core import Metric

from sluice.gateway.telemetry.buckets import samples_of
from sluice.record.histogram import Histogram
from sluice.serving.model import Model
from sluice.serving.statistics import ModelStatistics

Labels = dict[str, str]


class _CounterType(str):
    """The word "counter", which the library does not recognize.

    It names families of counters that it recognizes `…_total`. Triton's have no such ending, and dashboards made for
    Triton use the bare names.
    """

    __slots__ = ()
    __hash__ = str.__hash__

    def __eq__(self, other: object) -> bool:
        return self is other


COUNTER = _CounterType("counter")
GAUGE = "gauge"


class ModelFamily(NamedTuple):
    """A family with one value for each model."""

    name: str
    text: str
    read: Callable[[ModelStatistics], float]


class ModelSeries(NamedTuple):
    """A loaded model version: the labels of its series, and the statistics with their values."""

    labels: Labels
    statistics: ModelStatistics


def model_series(model: Model) -> ModelSeries:
    """Return a model's labels and statistics. Its configured tags get an underscore before the name, as in Triton."""
    tags = {f"_{name}": value for name, value in model.config.metric_tags.items()}
    return ModelSeries({**tags, "model": model.name, "version": str(model.spec.version)}, model.statistics)


def empty_family(name: str, text: str, kind: str) -> Metric:
    """Return a family without samples; samples may have any names."""
    build_family = Metric(name, text, "unknown")
    build_family.type = kind
    return build_family


def build_family(name: str, text: str, kind: str, values: Iterable[tuple[Labels, float]]) -> Metric:
    made = empty_family(name, text, kind)
    for labels, value in values:
        made.add_sample(name, labels, value)
    return made


def build_model_family(declared: ModelFamily, kind: str, series: Iterable[ModelSeries]) -> Metric:
    values = ((each.labels, declared.read(each.statistics)) for each in series)
    return build_family(declared.name, declared.text, kind, values)


def add_histogram(made: Metric, labels: Labels, histogram: Histogram) -> None:
    """Add the samples of `histogram` to `made`, as Prometheus has them."""
    made.samples += samples_of(made.name, labels, histogram)
