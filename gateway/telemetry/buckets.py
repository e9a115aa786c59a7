"""Families of Prometheus whose series are rows of plain numbers.

The page of a server with a hundred models is nine tenths buckets, so a family keeps its histograms as they are, and
makes the library's samples only for readers that ask for those.
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from itertools import accumulate

from prometheus_client.core import Exemplar, Metric
from prometheus_client.samples import Sample
from prometheus_client.utils import floatToGoString

from sluice.record.histogram import Histogram


class BucketFamily(Metric):
    """A histogram whose series are rows of label values and counts, all with the same bounds and names of labels."""

    def __init__(self, name: str, text: str, bounds: Sequence[float], labels: Sequence[str]) -> None:
        super().__init__(name, text, "histogram")
        self.bounds = tuple(bounds)
        self._labelnames = tuple(labels)
        self.rows: list[tuple[tuple[str, ...], Histogram]] = []

    @property
    def label_names(self) -> tuple[str, ...]:
        return self._labelnames

    def add(self, labels: tuple[str, ...], histogram: Histogram) -> None:
        """Add a series."""
        self.rows.append((labels, histogram))

    def renamed(self, name: str, text: str, labels: Sequence[str], constants: tuple[str, ...] = ()) -> "BucketFamily":
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
        self.rows: list[tuple[tuple[str, ...], float]] = []

    @property
    def label_names(self) -> tuple[str, ...]:
        return self._labelnames

    def add(self, labels: tuple[str, ...], value: float) -> None:
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
