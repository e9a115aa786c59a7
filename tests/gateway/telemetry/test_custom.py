import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.openmetrics import exposition

from sluice.errors import ErrorCode, SluiceError
from sluice.gateway.telemetry.custom import CustomMetricRegistry
from sluice.gateway.telemetry.page import is_reserved_name
from sluice.serving.backend import CustomMetricKind, CustomMetrics


@pytest.fixture
def custom() -> CustomMetricRegistry:
    return CustomMetricRegistry(is_reserved_name)


def exposed(custom: CustomMetricRegistry) -> list[str]:
    registry = CollectorRegistry(auto_describe=False)
    registry.register(custom)
    assert exposition.generate_latest(registry)  # type: ignore[no-untyped-call]
    return generate_latest(registry).decode().splitlines()


def test_it_is_what_backends_ask_for(custom: CustomMetricRegistry) -> None:
    asked_for: CustomMetrics = custom
    assert asked_for.family("requests", "Requests", CustomMetricKind.COUNTER) is not None


def test_a_counter_keeps_its_name(custom: CustomMetricRegistry) -> None:
    metric = custom.family("requests", "How many", CustomMetricKind.COUNTER).metric({"model": "m", "version": "1"})
    metric.increment(2)
    metric.increment(0.5)
    assert metric.value() == 2.5
    assert exposed(custom) == [
        "# HELP requests How many",
        "# TYPE requests counter",
        'requests{model="m",version="1"} 2.5',
    ]


def test_a_gauge_goes_up_and_down(custom: CustomMetricRegistry) -> None:
    metric = custom.family("load", "Load", CustomMetricKind.GAUGE).metric({})
    metric.set(3)
    metric.increment(-5)
    assert metric.value() == -2
    assert exposed(custom)[1:] == ["# TYPE load gauge", "load -2.0"]


def test_a_histogram_counts_by_bucket(custom: CustomMetricRegistry) -> None:
    metric = custom.family("size", "Sizes", CustomMetricKind.HISTOGRAM).metric({"k": "v"}, [1, 10])
    for value in (1, 5, 100):
        metric.observe(value)
    assert exposed(custom)[1:] == [
        "# TYPE size histogram",
        'size_bucket{k="v",le="1.0"} 1.0',
        'size_bucket{k="v",le="10.0"} 2.0',
        'size_bucket{k="v",le="+Inf"} 3.0',
        'size_count{k="v"} 3.0',
        'size_sum{k="v"} 106.0',
    ]


def test_equal_names_and_labels_are_one_series_until_all_delete_the_family(custom: CustomMetricRegistry) -> None:
    families = [custom.family("hits", "Hits", CustomMetricKind.COUNTER) for _ in range(2)]
    first, second = families[0].metric({"a": "1", "b": "2"}), families[1].metric({"b": "2", "a": "1"})
    other = families[0].metric({"a": "other"})
    first.increment(1)
    second.increment(1)
    assert second.value() == 2
    for release in (first.release, second.release, other.release, families[0].release, families[0].release):
        release()
    assert exposed(custom)[2:] == ['hits{a="1",b="2"} 2.0', 'hits{a="other"} 0.0']
    again = families[1].metric({"a": "1", "b": "2"})
    again.increment(1)
    assert again.value() == 3
    families[1].release()
    assert exposed(custom) == []
    assert custom.family("hits", "Free again", CustomMetricKind.GAUGE).metric({}).value() == 0


def test_a_family_without_series_is_not_shown(custom: CustomMetricRegistry) -> None:
    custom.family("hits", "Hits", CustomMetricKind.COUNTER)
    assert exposed(custom) == []


def test_another_kind_is_refused(custom: CustomMetricRegistry) -> None:
    custom.family("hits", "Hits", CustomMetricKind.COUNTER)
    with pytest.raises(SluiceError, match="'hits' is a counter already, and cannot be a gauge") as caught:
        custom.family("hits", "Hits", CustomMetricKind.GAUGE)
    assert caught.value.code is ErrorCode.ALREADY_EXISTS


@pytest.mark.parametrize(
    ("name", "labels", "buckets"),
    [
        *((name, {}, [1]) for name in ("", "1st", "a b", "ä", "a-b", "a\n")),
        *(("size", {label: "x"}, [1]) for label in ("", "1st", "a:b", "__name__", "le")),
        *(("size", {}, buckets) for buckets in (None, [2, 1], [1, 1], [1, float("inf")], [float("nan")])),
    ],
)
def test_names_labels_and_buckets_that_prometheus_does_not_take(
    custom: CustomMetricRegistry, name: str, labels: dict[str, str], buckets: list[float] | None
) -> None:
    with pytest.raises(SluiceError) as caught:
        custom.family(name, "", CustomMetricKind.HISTOGRAM).metric(labels, buckets)
    assert caught.value.code is ErrorCode.INVALID
    assert exposed(custom) == []


def test_only_histograms_have_buckets(custom: CustomMetricRegistry) -> None:
    with pytest.raises(SluiceError, match="Unexpected args found in gauge Metric constructor"):
        custom.family("load", "", CustomMetricKind.GAUGE).metric({}, [1])


@pytest.mark.parametrize("amount", [-1, float("nan")])
def test_a_counter_only_grows(custom: CustomMetricRegistry, amount: float) -> None:
    metric = custom.family("hits", "", CustomMetricKind.COUNTER).metric({})
    with pytest.raises(SluiceError, match="can only be incremented monotonically") as caught:
        metric.increment(amount)
    assert caught.value.code is ErrorCode.INVALID
    assert metric.value() == 0


@pytest.mark.parametrize(
    ("kind", "operation"),
    [
        (CustomMetricKind.COUNTER, "set"),
        (CustomMetricKind.COUNTER, "observe"),
        (CustomMetricKind.GAUGE, "observe"),
        (CustomMetricKind.HISTOGRAM, "set"),
        (CustomMetricKind.HISTOGRAM, "increment"),
        (CustomMetricKind.HISTOGRAM, "value"),
    ],
)
def test_what_a_kind_cannot_do(custom: CustomMetricRegistry, kind: CustomMetricKind, operation: str) -> None:
    metric = custom.family("m", "", kind).metric({}, [1] if kind is CustomMetricKind.HISTOGRAM else None)
    with pytest.raises(SluiceError) as caught:
        getattr(metric, operation)(*([] if operation == "value" else [1]))
    assert caught.value.code is ErrorCode.UNIMPLEMENTED
    assert caught.value.message == f"TRITONSERVER_METRIC_KIND_{kind.name} does not support {operation.capitalize()}"


def test_what_was_released_is_of_no_use(custom: CustomMetricRegistry) -> None:
    family = custom.family("hits", "", CustomMetricKind.COUNTER)
    metric = family.metric({})
    metric.release()
    family.release()
    with pytest.raises(SluiceError, match="has been released"):
        metric.increment(1)
    with pytest.raises(SluiceError, match="has been released"):
        family.metric({})


def test_a_histogram_without_bounds_counts_all_in_one(custom: CustomMetricRegistry) -> None:
    custom.family("size", "", CustomMetricKind.HISTOGRAM).metric({}, []).observe(3)
    [family] = custom.collect()
    assert [(each.name, each.labels, each.value) for each in family.samples if each.name == "size_bucket"] == [
        ("size_bucket", {"le": "+Inf"}, 1)
    ]
