"""The whole page, with everything on it and with little."""

from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from sluice.errors import ErrorCode, SluiceError
from sluice.gateway.options.telemetry import MetricsSettings
from sluice.gateway.telemetry.aliases import TABLE, AliasedRegistry
from sluice.gateway.telemetry.custom import CustomMetricRegistry
from sluice.gateway.telemetry.exposition import write_openmetrics, write_text
from sluice.gateway.telemetry.machine import GpuSample
from sluice.gateway.telemetry.metrics import GatewayMetrics
from sluice.gateway.telemetry.page import InferenceCollector, MetricsPage, is_reserved_name, latency_options
from sluice.gateway.workers.counts import Family, SummedRegistry, WorkerCounts, read_counts
from sluice.serving.backend import CustomMetricKind
from sluice.serving.batching.scheduled_model import ScheduledModel
from sluice.serving.latencies import build_latency_recorder
from sluice.serving.statistics import CacheUsage
from tests.serving.batching.parts import AtOnceInstance, Client, HeldInstance, model_of

EVERYTHING = MetricsSettings(allows_gpu=False, has_summaries=True, has_histograms=True, has_triton_infer_aliases=True)
REMOTE = CacheUsage(None, num_hits=3, num_misses=2, is_up=False, num_errors=5, num_bypassed=7)
TRITON = Path(__file__).parent / "data" / "triton_metrics.txt"
"""HELP and TYPE lines of tritonserver 2.51's metrics page."""


def served() -> ScheduledModel:
    model = model_of("response_cache { enable: true }", AtOnceInstance())
    model.statistics.latencies = build_latency_recorder(model.config, latency_options(EVERYTHING))
    client = Client(model)
    for name in ("a", "b"):
        client.submit(name)
    return model


def text_of(registry: CollectorRegistry) -> str:
    return generate_latest(registry).decode()


def values_of(registry: CollectorRegistry) -> dict[str, float]:
    """Return the page's values by series. The library's parser would rename counters."""
    lines = (line.rpartition(" ") for line in text_of(registry).splitlines() if not line.startswith("#"))
    return {series: float(value) for series, _, value in lines}


async def test_every_name_on_the_page_is_the_servers_own() -> None:
    metrics, model = GatewayMetrics(), served()
    gpus = [GpuSample("GPU-1", 0.5, 2, 1, 1.0, 2.0, 3.0)]
    metrics.registry.register(InferenceCollector(lambda: [model], EVERYTHING, REMOTE, lambda: gpus))
    names = {series.partition("{")[0] for series in values_of(metrics.registry)}
    assert len(names) > 70
    for name in names:
        with pytest.raises(SluiceError) as caught:
            CustomMetricRegistry(is_reserved_name).family(name, "", CustomMetricKind.GAUGE)
        assert caught.value.code is ErrorCode.ALREADY_EXISTS, name


async def test_models_metrics_stand_beside_tritons() -> None:
    registry = CollectorRegistry(auto_describe=False)
    page = MetricsPage(registry, lambda: [served()], EVERYTHING)
    page.custom.family("mine", "Mine", CustomMetricKind.GAUGE).metric({}).set(1)
    text = text_of(registry)
    assert "mine 1.0" in text
    assert "nv_inference_request_success" in text
    await page.close()
    await page.close()


async def test_without_metrics_there_is_nothing() -> None:
    registry = CollectorRegistry(auto_describe=False)
    page = MetricsPage(registry, list, MetricsSettings(is_allowed=False, allows_cpu=False, allows_gpu=False))
    page.custom.family("mine", "Mine", CustomMetricKind.GAUGE).metric({}).set(1)
    assert text_of(registry) == ""
    await page.close()


async def test_the_processors_can_be_left_out() -> None:
    registry = CollectorRegistry(auto_describe=False)
    registry.register(InferenceCollector(list, MetricsSettings(allows_cpu=False)))
    assert "nv_cpu" not in text_of(registry)


async def test_the_aliases_say_the_same() -> None:
    model = served()
    model.statistics.infer.fail.count = 3
    registry = CollectorRegistry(auto_describe=False)
    registry.register(InferenceCollector(lambda: [model], EVERYTHING))
    labels = '{model="echo",version="1"}'
    values = {name.removesuffix(labels): value for name, value in values_of(registry).items()}
    assert values["triton_infer_request_duration_us"] == values["nv_inference_request_duration_us"]
    assert values["triton_infer_queue_duration_us"] == values["nv_inference_queue_duration_us"]
    parts = sum(values[f"nv_inference_compute_{part}_duration_us"] for part in ("input", "infer", "output"))
    assert values["triton_infer_compute_duration_us"] == pytest.approx(parts, abs=2)
    assert values["triton_infer_success_count"] == 2
    assert values["triton_infer_failure_count"] == 3
    assert values["triton_infer_total_request_count"] == 5
    registry = CollectorRegistry(auto_describe=False)
    registry.register(InferenceCollector(lambda: [model]))
    assert "triton_" not in text_of(registry)


async def test_a_shared_cache_is_counted_once() -> None:
    models = [served(), served()]
    shared = CacheUsage(1000, used_bytes=500, num_entries=4, num_hits=3, num_misses=2)
    for model in models:
        model.statistics.cache = shared
    registry = CollectorRegistry(auto_describe=False)
    registry.register(InferenceCollector(lambda: models, cache=shared))
    lines = text_of(registry).splitlines()
    assert {"nv_cache_util 0.5", "nv_cache_num_entries 4.0", "nv_cache_num_lookups 5.0"} <= set(lines)
    assert not [line for line in lines if "sluice_response_cache" in line]
    models.clear()
    assert "nv_cache_num_hits 3.0" in text_of(registry).splitlines()


async def test_a_cache_elsewhere_tells_whether_it_answers() -> None:
    registry = CollectorRegistry(auto_describe=False)
    registry.register(InferenceCollector(list, cache=REMOTE))
    lines = set(text_of(registry).splitlines())
    assert {
        "nv_cache_num_hits 3.0",
        "sluice_response_cache_up 0.0",
        "sluice_response_cache_errors_total 5.0",
        "sluice_response_cache_bypassed_total 7.0",
    } <= lines
    assert not [line for line in lines if "nv_cache_util" in line or "num_entries" in line or "evictions" in line]


TRITON_COUNTERS = {
    *("nv_inference_request_success", "nv_inference_request_failure", "nv_inference_count", "nv_inference_exec_count"),
    *("nv_inference_request_duration_us", "nv_inference_queue_duration_us"),
    *(f"nv_inference_compute_{part}_duration_us" for part in ("input", "infer", "output")),
}


def whole_registry(*, has_exemplars: bool = True) -> CollectorRegistry:
    """Return a registry with every kind of family that the server has, and with custom ones."""
    metrics, model = GatewayMetrics(), served()
    record = metrics.open_request("rill", "openai_chat")
    record.close()
    if has_exemplars:
        [tally] = metrics.tallies.values()
        tally.request_duration.add_traced(0.02, {"trace_id": "ab" * 16, "span_id": "cd" * 8}, 101.0)
    gpus = [GpuSample("GPU-1", 0.5, 2, 1, 1.0, 2.0, 3.0)]
    metrics.registry.register(InferenceCollector(lambda: [model], EVERYTHING, REMOTE, lambda: gpus))
    custom = CustomMetricRegistry(is_reserved_name)
    for name in ("mine", "theirs_total"):
        custom.family(name, "Custom", CustomMetricKind.COUNTER).metric({"a": "b"}).increment(2)
    metrics.registry.register(custom)
    return metrics.registry


def summed(own: CollectorRegistry) -> CollectorRegistry:
    """Return what the host of a worker with the same counts shows."""
    counts = WorkerCounts()
    packed = msgspec.msgpack.encode(read_counts(whole_registry()))
    counts.keep(1, msgspec.msgpack.decode(packed, type=list[Family]))
    return SummedRegistry(own, counts)


@pytest.mark.parametrize("has_exemplars", [True, False], ids=["exemplars", "none"])
@pytest.mark.parametrize("has_workers", [True, False], ids=["workers", "alone"])
async def test_a_strict_reader_takes_the_openmetrics_page(has_exemplars: bool, has_workers: bool) -> None:
    own = whole_registry(has_exemplars=has_exemplars)
    page = write_openmetrics(AliasedRegistry(summed(own) if has_workers else own, tuple(TABLE))).decode()
    families = {each.name: each for each in text_string_to_metric_families(page)}  # type: ignore[no-untyped-call]
    assert TRITON_COUNTERS | {"mine", "theirs"} <= {name for name, each in families.items() if each.type == "counter"}
    [success] = families["nv_inference_request_success"].samples
    assert (success.name, success.value) == ("nv_inference_request_success_total", 4 if has_workers else 2)
    found = [each.exemplar for each in families["sluice_request_duration_seconds"].samples if each.exemplar]
    assert bool(found) == (has_exemplars or has_workers)


@pytest.mark.parametrize("has_workers", [True, False], ids=["workers", "alone"])
async def test_the_text_page_has_tritons_names(has_workers: bool) -> None:
    own = whole_registry()
    lines = write_text(summed(own) if has_workers else own).decode().splitlines()
    types = {line for line in lines if line.startswith("# TYPE")}
    samples = {line.partition("{")[0] for line in lines if not line.startswith("#")}
    assert {f"# TYPE {name} counter" for name in (*TRITON_COUNTERS, "mine", "theirs_total")} <= types
    assert TRITON_COUNTERS | {"mine", "theirs_total"} <= samples


async def test_counters_of_workers_alone_keep_their_names() -> None:
    lines = write_text(summed(CollectorRegistry(auto_describe=False))).decode().splitlines()
    assert "# TYPE nv_inference_count counter" in lines
    assert any(line.startswith("nv_inference_count{") for line in lines)


def exposed(*models: ScheduledModel) -> str:
    registry = CollectorRegistry(auto_describe=False)
    registry.register(InferenceCollector(lambda: models))
    return text_of(registry)


def described(text: str) -> Iterator[str]:
    return (line for line in text.splitlines() if line.startswith("#"))


async def test_families_are_those_of_triton_word_by_word() -> None:
    model = model_of("", AtOnceInstance())
    model.statistics.cache = CacheUsage(1 << 20)
    assert list(described(exposed(model))) == list(described(TRITON.read_text()))


async def test_values_come_with_model_and_version() -> None:
    held = HeldInstance()
    client = Client(model_of('metric_tags { key: "team" value: "a" }', held))
    client.submit("a", rows=3)
    client.submit("b")
    client.submit("c")
    held.finish()
    text = exposed(client.model)
    labels = '_team="a",model="echo",version="1"'
    assert f"nv_inference_request_success{{{labels}}} 1.0" in text
    assert f"nv_inference_count{{{labels}}} 3.0" in text
    assert f"nv_inference_exec_count{{{labels}}} 1.0" in text
    assert f"nv_inference_pending_request_count{{{labels}}} 1.0" in text
    assert 'nv_inference_request_failure{_team="a",model="echo",reason="REJECTED",version="1"} 0.0' in text
    assert "nv_cache" not in text


async def test_durations_are_microseconds() -> None:
    model = model_of("", AtOnceInstance())
    model.statistics.infer.success.ns = 1_234_567
    assert 'nv_inference_request_duration_us{model="echo",version="1"} 1234.0' in exposed(model)


async def test_an_unloaded_model_takes_its_series_along() -> None:
    models = [model_of("", AtOnceInstance())]
    registry = CollectorRegistry(auto_describe=False)
    registry.register(InferenceCollector(lambda: models))
    assert 'model="echo"' in text_of(registry)
    models.clear()
    assert 'model="echo"' not in text_of(registry)
