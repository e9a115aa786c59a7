"""Metrics that models make themselves."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from serving.backend import CustomMetric, CustomMetricFamily, CustomMetricKind
from sluice.errors import ErrorCode, SluiceError
from tests.serving.backends.python.parts import TEXT, ask, loaded, write_model
from tests.waiting import until

CODE = """
Family = pb_utils.MetricFamily

class TritonPythonModel:
    def initialize(self, args):
        self.name = args["model_instance_name"]
        self.family = Family(name="seen", description="What was seen", kind=Family.COUNTER)
        self.metric = self.family.Metric(labels={"model": args["model_name"]})

    def execute(self, requests):
        return [text(getattr(self, text_of(each))()) for each in requests]

    def count(self):
        self.metric.increment(2)
        return self.metric.value()

    def gauge(self):
        self.level = Family("level", "How high", Family.GAUGE)
        self.high, self.low = self.level.Metric(), self.level.Metric({"place": "low"})
        self.high.set(-1.5)
        self.high.increment(-1)
        self.low.set(7)
        return self.high.value(), self.low.value()

    def histogram(self):
        self.times = Family(name="times", description="How long", kind=Family.HISTOGRAM)
        self.time = self.times.Metric(labels={}, buckets=[0.5, 1, 2])
        self.time.observe(0.75)
        return self.times.Metric(buckets=[0.5, 1, 2]) is not None

    def let_go(self):
        del self.metric
        return "gone"

    def family_first(self):
        family = Family("short", "Not for long", Family.COUNTER)
        metric = family.Metric()
        del family
        return self.error(lambda: metric.value())

    def errors(self):
        made = self.family.Metric
        times = Family("times", "How long", Family.HISTOGRAM)
        tried = [
            lambda: self.metric.increment(-1),
            lambda: self.metric.set(1),
            lambda: self.metric.observe(1),
            lambda: times.Metric(buckets=[1.0]).value(),
            lambda: Family("seen", "As another", Family.GAUGE),
            lambda: made(["labels"]),
            lambda: made({"number": 1}),
            lambda: made(buckets=[1.0]),
            lambda: times.Metric(),
            lambda: times.Metric(buckets=(1.0, 2.0)),
            lambda: times.Metric(buckets=[2.0, 1.0]),
        ]
        return "|".join(self.error(each) for each in tried)

    def error(self, call):
        try:
            return str(call())
        except pb_utils.TritonModelException as error:
            return str(error)

    def exit(self):
        os._exit(1)

    def finalize(self):
        self.metric.increment(100)
"""


@dataclass
class Series:
    family: "Family"
    labels: dict[str, str]
    buckets: tuple[float, ...]
    total: float = 0.0
    observed: list[float] = field(default_factory=list)
    num_holders: int = 0

    def refuse_unless(self, kinds: set[CustomMetricKind], operation: str) -> None:
        if self.family.kind not in kinds:
            raise SluiceError(ErrorCode.UNIMPLEMENTED, f"no {operation} of a {self.family.kind}")


class Held:
    """Metric as one holder sees it."""

    def __init__(self, series: Series) -> None:
        self.series = series
        series.num_holders += 1
        self.is_released = False

    def increment(self, value: float) -> None:
        self.series.refuse_unless({CustomMetricKind.COUNTER, CustomMetricKind.GAUGE}, "increment")
        if value < 0 and self.series.family.kind is CustomMetricKind.COUNTER:
            raise SluiceError(ErrorCode.INVALID, "a counter only grows")
        self.series.total += value

    def set(self, value: float) -> None:
        self.series.refuse_unless({CustomMetricKind.GAUGE}, "set")
        self.series.total = value

    def observe(self, value: float) -> None:
        self.series.refuse_unless({CustomMetricKind.HISTOGRAM}, "observe")
        self.series.observed.append(value)

    def value(self) -> float:
        self.series.refuse_unless({CustomMetricKind.COUNTER, CustomMetricKind.GAUGE}, "value")
        return self.series.total

    def release(self) -> None:
        assert not self.is_released
        self.is_released = True
        self.series.num_holders -= 1
        if not self.series.num_holders:
            self.series.family.series.remove(self.series)


@dataclass
class Family:
    name: str
    description: str
    kind: CustomMetricKind
    owner: "Page"
    series: list[Series] = field(default_factory=list)
    num_holders: int = 0

    def metric(self, labels: Mapping[str, str], buckets: Sequence[float] | None = None) -> CustomMetric:
        if buckets is not None and list(buckets) != sorted(buckets):
            raise SluiceError(ErrorCode.INVALID, "buckets ascend")
        for each in self.series:
            if each.labels == labels:
                return Held(each)
        self.series.append(Series(self, dict(labels), tuple(buckets or ())))
        return Held(self.series[-1])

    def release(self) -> None:
        self.num_holders -= 1
        if not self.num_holders:
            del self.owner.families[self.name]


class Page:
    """All metrics of a server, without the page that shows them."""

    def __init__(self) -> None:
        self.families: dict[str, Family] = {}

    def family(self, name: str, description: str, kind: CustomMetricKind) -> CustomMetricFamily:
        family = self.families.setdefault(name, Family(name, description, kind, self))
        if family.kind is not kind:
            raise SluiceError(ErrorCode.ALREADY_EXISTS, f"{name} is a {family.kind}")
        family.num_holders += 1
        return family


async def test_a_model_counts(tmp_path: Path) -> None:
    page = Page()
    async with loaded(write_model(tmp_path / "counting", CODE), custom_metrics=page) as model:
        assert await ask(model, "count") == "2.0"
        assert await ask(model, "count") == "4.0"
        assert await ask(model, "gauge") == "(-2.5, 7.0)"
        assert await ask(model, "histogram") == "True"
        (seen,) = page.families["seen"].series
        assert (page.families["seen"].description, seen.labels, seen.total) == (
            "What was seen",
            {"model": "counting"},
            4.0,
        )
        assert {each.labels.get("place"): each.total for each in page.families["level"].series} == {
            None: -2.5,
            "low": 7.0,
        }
        (times,) = page.families["times"].series
        assert (times.buckets, times.observed, times.num_holders) == ((0.5, 1.0, 2.0), [0.75], 1)
    assert seen.total == 104.0
    assert page.families["seen"].series == [seen], "what was counted outlives the model"


async def test_what_the_model_lets_go_is_released(tmp_path: Path) -> None:
    page = Page()
    async with loaded(write_model(tmp_path / "counting", CODE), custom_metrics=page) as model:
        assert page.families["seen"].series
        assert await ask(model, "let_go") == "gone"
        await until(lambda: not page.families["seen"].series)
        assert "as the corresponding 'MetricFamily' has been deleted" in await ask(model, "family_first")
        await until(lambda: page.families.keys() == {"seen"})


async def test_instances_share_a_series_that_outlives_a_crash(tmp_path: Path) -> None:
    page = Page()
    source = write_model(tmp_path / "counting", CODE, "instance_group { count: 2 }" + TEXT)
    async with loaded(source, custom_metrics=page) as model:
        (seen,) = page.families["seen"].series
        assert seen.num_holders == 2
        with pytest.raises(SluiceError, match="not healthy"):
            await ask(model, "exit")
        await until(lambda: seen.num_holders == 3)
    assert page.families["seen"].series == [seen]


async def test_what_is_refused_is_an_exception_of_the_model(tmp_path: Path) -> None:
    async with loaded(write_model(tmp_path / "counting", CODE), custom_metrics=Page()) as model:
        assert (await ask(model, "errors")).split("|") == [
            "Failed to increment metric value: a counter only grows",
            "Failed to set metric value: no set of a counter",
            "Failed to observe metric value: no observe of a counter",
            "Failed to get metric value: no value of a histogram",
            "Error when creating MetricFamily: seen is a counter",
            "Failed to create metric. Labels must be a dictionary.",
            "Failed to create metric. Labels are str by str: 'number' is not.",
            "Failed to create metric. Unexpected buckets found.",
            "Failed to create metric. Missing required buckets.",
            "Failed to create metric. Buckets must be a list.",
            "Error when creating Metric: buckets ascend",
        ]


async def test_a_server_without_metrics_says_so(tmp_path: Path) -> None:
    with pytest.raises(SluiceError, match="Error when creating MetricFamily: the server runs without metrics"):
        async with loaded(write_model(tmp_path / "counting", CODE)):
            pass
