"""The metrics that one worker's model has made: the gateway's side."""

from serving.backend import CustomMetric, CustomMetricFamily, CustomMetricKind, CustomMetrics
from serving.backends.python.frames import MakeFamily, MakeMetric, UseMetric
from sluice.errors import ErrorCode, SluiceError


class ModelMetrics:
    """By the worker's numbers. Families stay when the worker ends, and so do their series."""

    def __init__(self, metrics: CustomMetrics | None) -> None:
        self._all = metrics
        self._families: dict[int, CustomMetricFamily] = {}
        self._metrics: dict[int, CustomMetric] = {}

    def answer(self, question: MakeFamily | MakeMetric | UseMetric) -> float | None:
        """Do it. Raises SluiceError where it cannot be done."""
        match question:
            case MakeFamily():
                self._families[question.family] = self._family(question)
            case MakeMetric(metric, family, labels, buckets):
                self._metrics[metric] = self._families[family].metric(labels, buckets)
            case UseMetric():
                return self._use(question)
        return None

    def _family(self, asked: MakeFamily) -> CustomMetricFamily:
        if self._all is None:
            raise SluiceError(ErrorCode.UNAVAILABLE, "the server runs without metrics")
        return self._all.family(asked.name, asked.description, CustomMetricKind(asked.kind))

    def _use(self, asked: UseMetric) -> float | None:
        metric = self._metrics[asked.metric]
        match asked.operation:
            case "increment":
                metric.increment(asked.value)
            case "set":
                metric.set(asked.value)
            case "observe":
                metric.observe(asked.value)
            case _:
                return metric.value()
        return None

    def let_go(self, numbers: list[int]) -> None:
        """The model holds these no more."""
        for number in numbers:
            held = self._metrics.pop(number, None) or self._families.pop(number, None)
            if held is not None:
                held.release()
