"""Metrics that models make themselves: what a backend asks of whoever shows them."""

from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Protocol


class MetricKind(StrEnum):
    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


class CustomMetric(Protocol):
    """One labelled series. Event loop's thread only."""

    def increment(self, value: float) -> None:
        """Raises SluiceError INVALID below 0 for a counter, UNIMPLEMENTED for a histogram."""

    def set(self, value: float) -> None:
        """Raises SluiceError UNIMPLEMENTED for what is no gauge."""

    def observe(self, value: float) -> None:
        """Raises SluiceError UNIMPLEMENTED for what is no histogram."""

    def value(self) -> float:
        """Raises SluiceError UNIMPLEMENTED for a histogram."""

    def release(self) -> None:
        """Its model holds it no more. The series stays, as in Triton: it may be made again, and go on. Idempotent."""


class MetricFamily(Protocol):
    """A name with its series. Event loop's thread only."""

    def metric(self, labels: Mapping[str, str], buckets: Sequence[float] | None = None) -> CustomMetric:
        """The series of those labels, the same for equal ones. Raises SluiceError INVALID for buckets that are none."""

    def release(self) -> None:
        """Its model has deleted it: the family goes, with its series, when all who made it have. Idempotent."""


class CustomMetrics(Protocol):
    """All of a server."""

    def family(self, name: str, description: str, kind: MetricKind) -> MetricFamily:
        """The family of that name. Raises SluiceError ALREADY_EXISTS where it is there with another kind."""
