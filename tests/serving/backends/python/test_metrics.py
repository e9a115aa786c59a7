"""Metrics that models make themselves."""

from pathlib import Path

import pytest

from sluice.errors import SluiceError
from sluice.gateway.telemetry.custom import CustomMetricRegistry
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
        del self.family
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
        if hasattr(self, "metric"):
            self.metric.increment(100)
"""


def registry() -> CustomMetricRegistry:
    """The server's own, without families that are reserved."""
    return CustomMetricRegistry(lambda name: False)


def samples(metrics: CustomMetricRegistry) -> dict[str, float]:
    """What the page shows, by name and labels."""
    shown = (sample for family in metrics.collect() for sample in family.samples)
    return {each.name + "".join(f" {key}={value}" for key, value in each.labels.items()): each.value for each in shown}


def num_holders(metrics: CustomMetricRegistry) -> dict[str, int]:
    return {name: family.num_holders for name, family in metrics._families.items()}


async def test_a_model_counts(tmp_path: Path) -> None:
    metrics = registry()
    async with loaded(write_model(tmp_path / "counting", CODE), custom_metrics=metrics) as model:
        assert await ask(model, "count") == "2.0"
        assert await ask(model, "count") == "4.0"
        assert await ask(model, "gauge") == "(-2.5, 7.0)"
        assert await ask(model, "histogram") == "True"
        shown = samples(metrics)
        assert {name: shown[name] for name in ("seen model=counting", "level", "level place=low")} == {
            "seen model=counting": 4.0,
            "level": -2.5,
            "level place=low": 7.0,
        }
        assert (shown["times_count"], shown["times_sum"]) == (1.0, 0.75)
        assert [family.documentation for family in metrics.collect()] == ["What was seen", "How high", "How long"]
    assert samples(metrics)["seen model=counting"] == 104.0, "what was counted outlives the model"


async def test_what_the_model_lets_go_is_released(tmp_path: Path) -> None:
    metrics = registry()
    async with loaded(write_model(tmp_path / "counting", CODE), custom_metrics=metrics) as model:
        assert "as the corresponding 'MetricFamily' has been deleted" in await ask(model, "family_first")
        await until(lambda: num_holders(metrics) == {"seen": 1})
        assert await ask(model, "let_go") == "gone"
        await until(lambda: num_holders(metrics) == {})


async def test_instances_share_a_series_that_outlives_a_crash(tmp_path: Path) -> None:
    metrics = registry()
    source = write_model(tmp_path / "counting", CODE, "instance_group { count: 2 }" + TEXT)
    async with loaded(source, custom_metrics=metrics) as model:
        assert num_holders(metrics) == {"seen": 2}
        await ask(model, "count")
        with pytest.raises(SluiceError, match="not healthy"):
            await ask(model, "exit")
        await until(lambda: num_holders(metrics) == {"seen": 3})
        assert samples(metrics) == {"seen model=counting": 2.0}


async def test_what_is_refused_is_an_exception_of_the_model(tmp_path: Path) -> None:
    async with loaded(write_model(tmp_path / "counting", CODE), custom_metrics=registry()) as model:
        assert (await ask(model, "errors")).split("|") == [
            "Failed to increment metric value: TRITONSERVER_METRIC_KIND_COUNTER can only be incremented monotonically "
            "by non-negative values.",
            "Failed to set metric value: TRITONSERVER_METRIC_KIND_COUNTER does not support Set",
            "Failed to observe metric value: TRITONSERVER_METRIC_KIND_COUNTER does not support Observe",
            "Failed to get metric value: TRITONSERVER_METRIC_KIND_HISTOGRAM does not support Value",
            "Error when creating MetricFamily: metric family 'seen' is a counter already, and cannot be a gauge",
            "Failed to create metric. Labels must be a dictionary.",
            "Failed to create metric. Labels are str by str: 'number' is not.",
            "Failed to create metric. Unexpected buckets found.",
            "Failed to create metric. Missing required buckets.",
            "Failed to create metric. Buckets must be a list.",
            "Error when creating Metric: bucket boundaries must be finite and ascend",
        ]
