from collections.abc import Iterator
from pathlib import Path

from prometheus_client import CollectorRegistry, generate_latest

from sluice.gateway.telemetry.page import InferenceCollector
from sluice.serving.batching.scheduled_model import ScheduledModel
from sluice.serving.statistics import CacheUsage
from tests.serving.batching.parts import AtOnceInstance, Client, HeldInstance, model_of

TRITON = Path(__file__).parent / "data" / "triton_metrics.txt"
"""HELP and TYPE lines of tritonserver 2.51's metrics page."""


def exposed(*models: ScheduledModel) -> str:
    registry = CollectorRegistry(auto_describe=False)
    registry.register(InferenceCollector(lambda: models))
    return generate_latest(registry).decode()


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
    assert 'model="echo"' in generate_latest(registry).decode()
    models.clear()
    assert 'model="echo"' not in generate_latest(registry).decode()
