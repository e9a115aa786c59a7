"""Scrapes of a metrics page, and what changed from one to the next."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import inf

from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families

Labels = frozenset[tuple[str, str]]


@dataclass(frozen=True)
class Scrape:
    """The values of a metrics page at one time, in seconds of a monotonic clock."""

    at: float
    samples: Mapping[str, Mapping[Labels, float]]

    def value(self, name: str, **labels: str) -> float:
        """Return the sum of the samples that have these labels; 0 where there are none."""
        wanted = labels.items()
        return sum(value for found, value in self.samples.get(name, {}).items() if wanted <= found)

    def by(self, label: str, name: str, **labels: str) -> dict[str, float]:
        """Return the sums by the values of a label."""
        wanted, sums = labels.items(), defaultdict[str, float](float)
        for found, value in self.samples.get(name, {}).items():
            if wanted <= found:
                sums[dict(found).get(label, "")] += value
        return dict(sums)


def parse_scrape(text: str, at: float) -> Scrape:
    """Parse a page in Prometheus' text format. Raises ValueError for what is none."""
    return read_families(text_string_to_metric_families(text), at)


def read_families(families: Iterable[Metric], at: float) -> Scrape:
    """Read families of metrics."""
    samples: dict[str, dict[Labels, float]] = {}
    for family in families:
        for sample in family.samples:
            samples.setdefault(sample.name, {})[frozenset(sample.labels.items())] = float(sample.value)
    return Scrape(at, samples)


@dataclass(frozen=True)
class Change:
    """Two scrapes of one server."""

    before: Scrape
    after: Scrape

    @property
    def seconds(self) -> float:
        """The time between them."""
        return max(self.after.at - self.before.at, 1e-9)

    def increase(self, name: str, **labels: str) -> float:
        """Return by how much a counter grew; one that began anew counts from 0."""
        return sum(self.increases("", name, **labels).values())

    def increases(self, label: str, name: str, **labels: str) -> dict[str, float]:
        """Return by how much a counter grew, by the values of a label."""
        wanted, grown = labels.items(), defaultdict[str, float](float)
        before = self.before.samples.get(name, {})
        for found, value in self.after.samples.get(name, {}).items():
            if wanted <= found:
                last = before.get(found, 0.0)
                grown[dict(found).get(label, "")] += value - last if value >= last else value
        return dict(grown)

    def rate(self, name: str, **labels: str) -> float:
        """Return the growth of a counter in a second."""
        return self.increase(name, **labels) / self.seconds

    def least(self, name: str, **labels: str) -> float:
        """Return the smaller value of a gauge: what it was at both times."""
        return min(self.before.value(name, **labels), self.after.value(name, **labels))

    def mean(self, name: str, **labels: str) -> float:
        """Return the mean of a gauge over both times."""
        return (self.before.value(name, **labels) + self.after.value(name, **labels)) / 2

    def quantile(self, quantile: float, name: str, **labels: str) -> float | None:
        """Return a quantile of what a histogram got in between, as Prometheus' histogram_quantile; None for nothing."""
        grown = self.increases("le", f"{name}_bucket", **labels)
        buckets = sorted((inf if bound == "+Inf" else float(bound), count) for bound, count in grown.items())
        return bucket_quantile(quantile, buckets)


def bucket_quantile(quantile: float, buckets: Sequence[tuple[float, float]]) -> float | None:
    """Return a quantile of a histogram's cumulative counts by their upper bounds, the last one infinite; None where it
    has counted nothing."""
    if not buckets or buckets[-1][1] <= 0:
        return None
    rank, last_bound, last_count = quantile * buckets[-1][1], 0.0, 0.0
    for bound, count in buckets:
        if count >= rank:
            if bound == inf:
                return last_bound
            share = (rank - last_count) / (count - last_count) if count > last_count else 1.0
            return last_bound + (bound - last_bound) * share
        last_bound, last_count = bound, count
    return last_bound
