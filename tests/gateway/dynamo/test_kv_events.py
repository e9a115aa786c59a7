"""Where Dynamo's router finds the events of an engine's prefix cache."""

import json

import pytest

from sluice.engine.config import EngineConfig, Runtime
from sluice.errors import SluiceError
from sluice.gateway.dynamo.kv_events import KvEvents, find_kv_events


def of_vllm(**events: object) -> EngineConfig:
    settings = {"kv_events_config": json.dumps(events)}
    return EngineConfig(model_path="m", runtime=Runtime.VLLM, runtime_settings=settings)


def test_vllm_publishes_where_it_is_told_to() -> None:
    config = of_vllm(enable_kv_cache_events=True, endpoint="tcp://*:6001", topic="kv", replay_endpoint="tcp://*:6002")
    assert find_kv_events(config) == KvEvents("tcp://127.0.0.1:6001", "kv")
    assert find_kv_events(of_vllm(enable_kv_cache_events=True)) == KvEvents("tcp://127.0.0.1:5557")


def test_our_executor_publishes_where_it_is_told_to() -> None:
    config = EngineConfig(model_path="m", kv_events_endpoint="tcp://*:6001", kv_events_topic="kv")
    assert find_kv_events(config) == KvEvents("tcp://127.0.0.1:6001", "kv")


@pytest.mark.parametrize(
    "config",
    [
        EngineConfig(model_path="m"),
        EngineConfig(model_path="m", runtime=Runtime.VLLM),
        of_vllm(endpoint="tcp://*:6001"),
        of_vllm(enable_kv_cache_events=True, publisher="null"),
    ],
)
def test_an_engine_that_publishes_nothing_has_no_place(config: EngineConfig) -> None:
    assert find_kv_events(config) is None


def test_a_setting_that_is_no_json_is_refused() -> None:
    config = EngineConfig(model_path="m", runtime=Runtime.VLLM, runtime_settings={"kv_events_config": "yes"})
    with pytest.raises(SluiceError, match="kv_events_config must be vLLM's KVEventsConfig"):
        find_kv_events(config)
