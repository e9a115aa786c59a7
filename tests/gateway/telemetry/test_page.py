"""The whole page, with everything on it and with little."""

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from gateway.options.telemetry import MetricsSettings
from gateway.telemetry.custom import CustomMetricRegistry
from gateway.telemetry.machine import GpuSample
from gateway.telemetry.metrics import GatewayMetrics
from gateway.telemetry.page import InferenceCollector, MetricsPage, is_reserved_name, latency_options
from serving.backend import CustomMetricKind
from serving.batching.scheduled_model import ScheduledModel
from serving.latencies import build_latency_recorder
from serving.statistics import CacheUsage
from sluice.errors import ErrorCode, SluiceError
from tests.serving.batching.parts import AtOnceInstance, Client, model_of

EVERYTHING = MetricsSettings(allows_gpu=False, has_summaries=True, has_histograms=True, has_triton_infer_aliases=True)
REMOTE = CacheUsage(None, num_hits=3, num_misses=2, is_up=False, num_errors=5, num_bypassed=7)


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


async def test_tensorrt_llms_families_are_there_unasked() -> None:
    registry = CollectorRegistry(auto_describe=False)
    page = MetricsPage(registry, list, MetricsSettings(allows_gpu=False))
    assert "# TYPE nv_trt_llm_request_metrics gauge" in text_of(registry).splitlines()
    await page.close()
