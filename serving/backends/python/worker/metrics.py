"""`pb_utils.MetricFamily` and its metrics: what the model holds here stands for a series on the server, which stays."""

import itertools
import weakref
from enum import Enum
from typing import Any, ClassVar

from serving.backends.python.frames import MakeFamily, MakeMetric, UseMetric
from serving.backends.python.worker.arguments import text
from serving.backends.python.worker.asking import Server
from serving.backends.python.worker.errors import TritonModelException

_numbers = itertools.count(1)


class MetricKind(Enum):
    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


class Metric:
    """One labelled series. Made by `MetricFamily.Metric`; gone with its family."""

    def __init__(self, family: int, labels: dict[str, str], buckets: list[float] | None) -> None:
        self._number = 0
        number = next(_numbers)
        Server.ask(MakeMetric(number, family, labels, buckets), "Error when creating Metric")
        self._number = number

    def increment(self, value: float) -> None:
        """Of a counter only by what is not negative."""
        self._use("increment", value)

    def set(self, value: float) -> None:
        """Of a gauge."""
        self._use("set", value)

    def observe(self, value: float) -> None:
        """Of a histogram."""
        self._use("observe", value)

    def value(self) -> float:
        """Of a counter or a gauge, over all instances that hold a metric of these labels."""
        value = self._use("value", 0.0, "get")
        assert value is not None
        return float(value)

    def _use(self, operation: str, value: float, verb: str = "") -> float | bool | None:
        failure = f"Failed to {verb or operation} metric value"
        if not self._number:
            raise TritonModelException(
                f"{failure}: Invalid metric operation as the corresponding 'MetricFamily' has been deleted. The "
                "'MetricFamily' object should be deleted AFTER its corresponding 'Metric' objects have been deleted."
            )
        return Server.ask(UseMetric(self._number, operation, float(value)), failure)

    def _clear(self) -> None:
        number, self._number = self._number, 0
        if number:
            Server.let_go([number])

    def __del__(self) -> None:
        self._clear()


class MetricFamily:
    """A name with its metrics. Families of one name and kind are one on the server, whichever model makes them."""

    COUNTER: ClassVar = MetricKind.COUNTER
    GAUGE: ClassVar = MetricKind.GAUGE
    HISTOGRAM: ClassVar = MetricKind.HISTOGRAM

    def __init__(self, name: str, description: str, kind: MetricKind) -> None:
        self._number = 0
        self._metrics: weakref.WeakSet[Metric] = weakref.WeakSet()
        if not isinstance(kind, MetricKind):
            raise TypeError(f"MetricFamily takes MetricFamily.COUNTER, GAUGE or HISTOGRAM as its kind, not {kind!r}")
        self._kind = kind
        number = next(_numbers)
        question = MakeFamily(number, text(name, "name"), text(description, "description"), kind.value)
        Server.ask(question, "Error when creating MetricFamily")
        self._number = number

    def Metric(self, labels: dict[str, str] | None = None, buckets: list[float] | None = None) -> Metric:
        """The series of these labels. A histogram takes the upper bounds of its buckets, ascending."""
        metric = Metric(self._number, _labels(labels), self._buckets(buckets))
        self._metrics.add(metric)
        return metric

    def _buckets(self, buckets: Any) -> list[float] | None:
        if buckets is None:
            if self._kind is MetricKind.HISTOGRAM:
                raise TritonModelException("Failed to create metric. Missing required buckets.")
            return None
        if not isinstance(buckets, list):
            raise TritonModelException("Failed to create metric. Buckets must be a list.")
        if self._kind is not MetricKind.HISTOGRAM:
            raise TritonModelException("Failed to create metric. Unexpected buckets found.")
        return [float(bound) for bound in buckets]

    def __del__(self) -> None:
        for metric in list(self._metrics):
            metric._clear()
        if self._number:
            Server.let_go([self._number])


def _labels(labels: Any) -> dict[str, str]:
    if labels is None:
        return {}
    if not isinstance(labels, dict):
        raise TritonModelException("Failed to create metric. Labels must be a dictionary.")
    for key, value in labels.items():
        if not isinstance(key, str) or not isinstance(value, str):
            raise TritonModelException(f"Failed to create metric. Labels are str by str: {key!r} is not.")
    return labels
