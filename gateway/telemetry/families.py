"""Families made by hand: what Triton calls by names that Prometheus' library would change."""

from collections.abc import Callable, Iterable
from typing import NamedTuple

from prometheus_client.core import Metric

from serving.model import Model
from serving.statistics import ModelStatistics

Labels = dict[str, str]


class _CounterType(str):
    """The word "counter", which the library does not recognize.

    For counters that it does recognize it names the family `…_total`; Triton's have no such ending, and the
    dashboards made for them ask for the bare names.
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


class Source(NamedTuple):
    """A loaded model version: the labels of its series, and where their values are."""

    labels: Labels
    statistics: ModelStatistics


def source_of(model: Model) -> Source:
    """With the tags that the model's configuration adds: as with Triton, an underscore before each name."""
    tags = {f"_{name}": value for name, value in model.config.metric_tags.items()}
    return Source({**tags, "model": model.name, "version": str(model.spec.version)}, model.statistics)


def empty_family(name: str, text: str, kind: str) -> Metric:
    """To be filled with samples of whatever names."""
    family = Metric(name, text, "unknown")
    family.type = kind
    return family


def family(name: str, text: str, kind: str, values: Iterable[tuple[Labels, float]]) -> Metric:
    """One sample for each of `values`."""
    made = empty_family(name, text, kind)
    for labels, value in values:
        made.add_sample(name, labels, value)
    return made


def model_family(declared: ModelFamily, kind: str, sources: Iterable[Source]) -> Metric:
    values = ((source.labels, declared.read(source.statistics)) for source in sources)
    return family(declared.name, declared.text, kind, values)
