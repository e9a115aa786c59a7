from math import isnan

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.openmetrics import exposition
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from sluice.errors import ErrorCode, SluiceError
from sluice.gateway.options.telemetry import MetricsSettings, parse_metrics_settings
from sluice.gateway.telemetry.page import InferenceCollector
from sluice.serving.batching.scheduled_model import ScheduledModel
from sluice.serving.latencies import LatencyOptions, build_latency_recorder
from sluice.serving.request import InferResponse
from tests.serving.batching.parts import CONFIG, AtOnceInstance, Client, HeldInstance, model_of, request

ALL = LatencyOptions(has_summaries=True, has_histograms=True)
HISTOGRAM = "nv_inference_first_response_histogram_ms"
CACHED = "response_cache { enable: true }"
DECOUPLED = "model_transaction_policy { decoupled: true }"
LABELS = {"model": "echo", "version": "1"}


def scraped(model: ScheduledModel, settings: MetricsSettings) -> str:
    registry = CollectorRegistry(auto_describe=False)
    registry.register(InferenceCollector(lambda: [model], settings))
    assert exposition.generate_latest(registry)  # type: ignore[no-untyped-call]
    return generate_latest(registry).decode()


def samples(model: ScheduledModel, *texts: str) -> dict[str, list[Sample]]:
    """Return the samples of a page with those settings, by family."""
    families = text_string_to_metric_families(scraped(model, parse_metrics_settings(texts)))
    return {family.name: family.samples for family in families}


def measured(extra: str, instance: AtOnceInstance | HeldInstance) -> ScheduledModel:
    model = model_of(extra, instance)
    model.statistics.latencies = build_latency_recorder(model.config, ALL)
    return model


def value(found: list[Sample], name: str, **labels: str) -> float:
    (only,) = [each.value for each in found if each.name == name and each.labels == LABELS | labels]
    return only


async def test_summaries_have_quantiles_count_and_sum() -> None:
    model = measured("", AtOnceInstance())
    client = Client(model)
    for number in range(3):
        client.submit(f"{number}")
    found = samples(model, "summary_latencies=true", "summary_quantiles=0.5:0.05,0.99:0.001")
    assert "nv_cache_hit_summary_per_model" not in found
    for part in ("request", "queue", "compute_input", "compute_infer", "compute_output"):
        name = f"nv_inference_{part}_summary_us"
        assert value(found[name], f"{name}_count") == 3
    request_us = found["nv_inference_request_summary_us"]
    name = "nv_inference_request_summary_us"
    assert value(request_us, f"{name}_sum") == model.statistics.infer.success.ns // 1000
    low, high = (value(request_us, name, quantile=quantile) for quantile in ("0.5", "0.99"))
    assert 0 < low <= high < 1e6
    assert len(request_us) == 4


async def test_without_requests_quantiles_are_no_numbers() -> None:
    found = samples(measured("", AtOnceInstance()), "summary_latencies=true")
    name = "nv_inference_request_summary_us"
    assert isnan(value(found[name], name, quantile="0.999"))


async def test_hits_and_misses_have_summaries_and_whole_requests_none() -> None:
    model = measured(CACHED, AtOnceInstance())
    assert "nv_inference_request_summary_us" not in samples(model, "summary_latencies=true")
    client = Client(model)
    for number in range(3):
        client.submit(f"{number}")
    found = samples(model, "summary_latencies=true")
    for name, count in (("nv_cache_hit_summary_per_model", 2), ("nv_cache_miss_summary_per_model", 1)):
        assert value(found[name], f"{name}_count") == count
        assert value(found[name], name, quantile="0.5") >= 0
    name = "nv_inference_compute_infer_summary_us"
    assert value(found[name], f"{name}_count") == 1


async def test_counters_can_be_left_out() -> None:
    model = measured(CACHED, AtOnceInstance())
    with_them, without = (samples(model, f"counter_latencies={text}") for text in ("true", "false"))
    gone = with_them.keys() - without.keys()
    assert len(gone) == 9
    assert gone == {name for name in with_them if name.endswith(("_duration_us", "_per_model"))}


async def test_only_what_was_asked_for_is_measured_and_shown() -> None:
    model = model_of("", AtOnceInstance())
    model.statistics.latencies = build_latency_recorder(model.config, LatencyOptions())
    assert model.statistics.latencies is None
    assert not [name for name in samples(model) if "summary" in name or "histogram" in name]


async def test_a_response_is_the_first_of_its_request() -> None:
    model = measured("", AtOnceInstance())
    client = Client(model)
    for number in range(3):
        client.submit(f"{number}")
    found = samples(model, "histogram_latencies=true")[HISTOGRAM]
    assert value(found, f"{HISTOGRAM}_count") == 3
    assert 0 < value(found, f"{HISTOGRAM}_sum") < 3000
    bounds = [each.labels["le"] for each in found if each.name.endswith("_bucket")]
    assert bounds == ["100.0", "500.0", "2000.0", "5000.0", "+Inf"]


@pytest.mark.parametrize("backend", ["test", "python"])
async def test_a_decoupled_request_counts_when_it_is_answered_first(backend: str) -> None:
    model = model_of(DECOUPLED, HeldInstance(), base=CONFIG.replace('"test"', f'"{backend}"'))
    model.statistics.latencies = build_latency_recorder(model.config, ALL)
    job = Client(model).submit("a")
    counted = []
    for is_final in (False, False, True):
        job.respond(InferResponse([job.request.inputs["X"].renamed("Y")], is_final=is_final))
        counted.append(value(samples(model, "histogram_latencies=true")[HISTOGRAM], f"{HISTOGRAM}_count"))
    assert counted == [1, 1, 1]


async def test_failures_are_no_first_responses() -> None:
    held = HeldInstance()
    model = measured("", held)
    client = Client(model)
    client.submit("a").fail(SluiceError(ErrorCode.INTERNAL, "no"))
    held.finish()
    client.submit("b").cancel()
    held.finish()
    found = samples(model, "histogram_latencies=true")[HISTOGRAM]
    assert value(found, f"{HISTOGRAM}_count") == 0


async def test_a_configuration_has_buckets_of_its_own() -> None:
    control = f'metric_identifier {{ family: "{HISTOGRAM}" }} histogram_options {{ buckets: [ 1, 2.5 ] }}'
    model = measured(f"model_metrics {{ metric_control {{ {control} }} }}", AtOnceInstance())
    found = samples(model, "histogram_latencies=true")[HISTOGRAM]
    assert [each.labels["le"] for each in found if each.name.endswith("_bucket")] == ["1.0", "2.5", "+Inf"]


async def test_the_wait_of_a_request_is_in_its_summaries() -> None:
    held = HeldInstance()
    model = measured("", held)
    client = Client(model)
    first = client.submit("a")
    second = model.submit(request("b"), lambda response: None)
    second.started_ns -= 5_000_000_000
    held.finish()
    held.finish()
    assert first.is_finished and second.is_finished
    found = samples(model, "summary_latencies=true")
    name = "nv_inference_queue_summary_us"
    assert value(found[name], name, quantile="0.999") == pytest.approx(5e6, rel=0.02)
