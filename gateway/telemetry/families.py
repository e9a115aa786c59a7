"""Metric families: Prometheus' model of them, with rows of plain numbers in place of samples, and Triton's names.

The page of a server with a hundred models is nine tenths buckets, so a family keeps its histograms as they are, and
makes the library's samples only for readers that ask for those. Some names of Triton's the library would change.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from itertools import accumulate
from typing import NamedTuple, TypeVar

from prometheus_client.core import Exemplar, Metric
from prometheus_client.samples import Sample
from prometheus_client.utils import floatToGoString

from sluice.record.histogram import Histogram
from sluice.serving.model import Model
from sluice.serving.statistics import ModelStatistics

T = TypeVar("T")
Labels = dict[str, str]
Row = tuple[str, ...]
"""The values of a sample's labels."""
Declared = tuple[str, str, Callable[[T], float]]
"""A family that has one value for each of its sources: its name, its text, and what reads the value."""
DeclaredParts = tuple[str, str, str, str, Mapping[str, Callable[[T], float]]]
"""A family: its kind, its name, its text, its own label ("" for none), and what reads a value, by those of that."""


class BucketFamily(Metric):
    """A histogram whose series are rows of label values and counts, all with the same bounds and names of labels."""

    def __init__(self, name: str, text: str, bounds: Sequence[float], labels: Sequence[str]) -> None:
        super().__init__(name, text, "histogram")
        self.bounds = tuple(bounds)
        self._labelnames = tuple(labels)
        self.rows: list[tuple[Row, Histogram]] = []

    @property
    def label_names(self) -> tuple[str, ...]:
        return self._labelnames

    def add(self, labels: Row, histogram: Histogram) -> None:
        """Add a series."""
        self.rows.append((labels, histogram))

    def renamed(self, name: str, text: str, labels: Sequence[str], constants: Row = ()) -> "BucketFamily":
        """Return the same rows as a family of another name, with other names of labels, and constants behind them."""
        made = BucketFamily(name, text, self.bounds, labels)
        made.rows = [((*row, *constants), histogram) for row, histogram in self.rows]
        return made

    @property
    def samples(self) -> list[Sample]:
        """The library's samples of all rows."""
        labelled = ((dict(zip(self._labelnames, row, strict=True)), histogram) for row, histogram in self.rows)
        return [sample for labels, histogram in labelled for sample in samples_of(self.name, labels, histogram)]

    @samples.setter
    def samples(self, samples: list[Sample]) -> None:
        assert not samples, "a family of rows takes no samples"


def samples_of(name: str, labels: Mapping[str, str], histogram: Histogram) -> Iterator[Sample]:
    """Yield the library's samples of a histogram."""
    cumulative = list(accumulate(histogram.counts))
    for index, (bound, count) in enumerate(zip(bound_texts(histogram.bounds), cumulative, strict=True)):
        traced = histogram.exemplars.get(index)
        exemplar = None if traced is None else Exemplar(*traced)
        yield Sample(f"{name}_bucket", {**labels, "le": bound}, float(count), None, exemplar)
    yield Sample(f"{name}_count", {**labels}, float(cumulative[-1]))
    yield Sample(f"{name}_sum", {**labels}, histogram.total)


@cache
def bound_texts(bounds: tuple[float, ...]) -> tuple[str, ...]:
    """Return the texts of bounds as the label `le` has them, infinity last."""
    return tuple(str(floatToGoString(bound)) for bound in (*bounds, float("inf")))  # type: ignore[no-untyped-call]


class ValueFamily(Metric):
    """Counters or gauges whose series are rows of label values and a number."""

    def __init__(self, name: str, text: str, kind: str, labels: Sequence[str]) -> None:
        super().__init__(name, text, kind)
        self._labelnames = tuple(labels)
        self.sample_name = f"{name}_total" if kind == "counter" else name
        self.rows: list[tuple[Row, float]] = []

    @property
    def label_names(self) -> tuple[str, ...]:
        return self._labelnames

    def add(self, labels: Row, value: float) -> None:
        """Add a series."""
        self.rows.append((labels, value))

    @property
    def samples(self) -> list[Sample]:
        """The library's samples of all rows."""
        names = self._labelnames
        return [Sample(self.sample_name, dict(zip(names, row, strict=True)), value) for row, value in self.rows]

    @samples.setter
    def samples(self, samples: list[Sample]) -> None:
        assert not samples, "a family of rows takes no samples"


def value_family(
    name: str, text: str, kind: str, labels: Sequence[str], rows: Iterable[tuple[Row, float]]
) -> ValueFamily:
    """Return a family of counters or gauges with those series."""
    family = ValueFamily(name, text, kind, labels)
    family.rows += ((row, float(value)) for row, value in rows)
    return family


def read_families(
    kind: str, declared: Iterable[Declared[T]], labels: Sequence[str], sources: Mapping[Row, T]
) -> Iterator[Metric]:
    """Yield families of counters or gauges, each with a value of every source. `sources` are by values of `labels`."""
    for name, text, read in declared:
        yield value_family(name, text, kind, labels, ((row, read(source)) for row, source in sources.items()))


def read_parts(
    declared: Iterable[DeclaredParts[T]], sources: Mapping[Row, T], labels: Sequence[str] = ("model",)
) -> Iterator[Metric]:
    """Yield families, each with the values of every source. `sources` are by values of `labels`."""
    for kind, name, text, label, reads in declared:
        family = ValueFamily(name, text, kind, (*labels, label) if label else labels)
        for row, source in sources.items():
            for part, read in reads.items():
                family.add((*row, part) if label else row, float(read(source)))
        yield family


# -- under names that the library would change


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
