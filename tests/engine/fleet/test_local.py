"""How replicas on one machine share its cores, memory and GPUs."""

import pytest

from sluice.engine.client.process import ProcessEngineClient
from sluice.engine.config import EngineConfig, Runtime
from sluice.engine.fleet import local
from sluice.engine.fleet.client import FleetClient
from sluice.engine.fleet.local import make_engine, split_config
from sluice.engine.runtimes import RuntimeChoice
from sluice.errors import SluiceError


@pytest.fixture(autouse=True)
def four_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "num_cores", lambda: 4)


def choose_gpus(monkeypatch: pytest.MonkeyPatch, *gpus: str) -> None:
    monkeypatch.setattr(local, "visible_gpus", lambda: gpus)
    choice = RuntimeChoice(Runtime.VLLM, "a test")
    monkeypatch.setattr(local, "choose_runtime", lambda _: choice)


async def test_one_has_all() -> None:
    config = EngineConfig(model_path="m")
    assert split_config(config, 1) == [config]
    engine = make_engine(config, 1)
    await engine.stop()
    assert isinstance(engine, ProcessEngineClient)


def test_on_the_cpu_they_share_cores_and_memory() -> None:
    given = EngineConfig(model_path="m", kv_cache_memory_bytes=900)
    for each in split_config(given, 3):
        assert (each.num_threads, each.kv_cache_memory_bytes) == (1, 300)
        assert each.memory_share == pytest.approx(1 / 3)
    assert [each.num_threads for each in split_config(EngineConfig(model_path="m"), 2)] == [2, 2]


def test_threads_and_blocks_that_are_given_are_each_replicas() -> None:
    given = EngineConfig(model_path="m", num_threads=4, num_blocks=100)
    assert [(each.num_threads, each.num_blocks) for each in split_config(given, 2)] == [(4, 100), (4, 100)]


def test_on_gpus_each_has_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    choose_gpus(monkeypatch, "4", "5", "6", "7")
    given = EngineConfig(model_path="m", tensor_parallel_size=2, kv_cache_memory_bytes=900, launcher=["nice"])
    first, second = split_config(given, 2)
    assert first.launcher == ["env", "CUDA_VISIBLE_DEVICES=4,5", "nice"]
    assert second.launcher == ["env", "CUDA_VISIBLE_DEVICES=6,7", "nice"]
    assert (first.num_threads, first.kv_cache_memory_bytes, first.memory_share) == (None, 900, 1.0)


def test_too_few_gpus_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    choose_gpus(monkeypatch, "0", "1", "2")
    with pytest.raises(SluiceError, match="2 replicas of 2 GPUs need 4, and there are 3") as refused:
        split_config(EngineConfig(model_path="m", tensor_parallel_size=2), 2)
    assert refused.value.param == "replicas"


async def test_several_are_one_engine() -> None:
    engine = make_engine(EngineConfig(model_path="m"), 3)
    await engine.stop()
    assert isinstance(engine, FleetClient)
    assert [each.name for each in engine.replicas] == ["0", "1", "2"]
