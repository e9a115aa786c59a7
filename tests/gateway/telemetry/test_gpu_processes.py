"""Whose GPU memory is whose."""

import os
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest

from gateway.telemetry.gpu import GpuSample, GpuSampler
from gateway.telemetry.gpu_processes import GpuProcess, engine_pids, lineage, process_memory
from gateway.telemetry.inference import InferenceCollector
from serving.model import Model
from tests.gateway.telemetry.test_gpu import Driver, Gpu, page, started
from tests.pipelines.llm.doubles import language_model
from tests.serving.batching.parts import AtOnceInstance, model_of


def served(name: str, pid: int | None) -> Model:
    """A language model as far as it matters here: its engine's process has this id, None before it has started."""
    return language_model(SimpleNamespace(engine=SimpleNamespace(pid=pid)), name)


def memory(gpus: Sequence[tuple[str, Sequence[GpuProcess]]], engines: dict[int, str]) -> dict[tuple[str, str], float]:
    samples = [sample for family in process_memory(gpus, engines) for sample in family.samples]
    return {(sample.labels["gpu_uuid"], sample.labels["model"]): sample.value for sample in samples}


def test_a_model_has_what_its_process_and_its_ranks_hold() -> None:
    gpus = [
        ("GPU-1", [GpuProcess((10, 5, 1), 100), GpuProcess((11, 10, 5, 1), 30), GpuProcess((77, 1), 7)]),
        ("GPU-2", [GpuProcess((12, 10, 5, 1), 40), GpuProcess((20, 5, 1), 50)]),
    ]
    assert memory(gpus, {10: "big", 20: "small"}) == {
        ("GPU-1", "big"): 130,
        ("GPU-2", "big"): 40,
        ("GPU-2", "small"): 50,
    }


def test_without_an_engine_on_a_gpu_there_is_no_family() -> None:
    assert list(process_memory([("GPU-1", [GpuProcess((77, 1), 7)])], {10: "big"})) == []


def test_engines_without_a_process_are_left_out() -> None:
    other = model_of("", AtOnceInstance())
    threaded = language_model(SimpleNamespace(engine=object()), "thread")
    assert engine_pids([other, threaded, served("early", None), served("big", 10)]) == {10: "big"}


def test_a_lineage_ends_with_the_first_process() -> None:
    found = lineage(os.getpid())
    assert found[:2] == (os.getpid(), os.getppid())
    assert len(set(found)) == len(found)


def test_a_process_that_is_not_there_stands_alone(tmp_path: Path) -> None:
    assert lineage(5, tmp_path) == (5,)


def test_a_programs_name_may_have_anything_in_it(tmp_path: Path) -> None:
    (tmp_path / "5").mkdir()
    (tmp_path / "5" / "stat").write_text("5 (a) b (c) S 3 5 5 0 -1")
    assert lineage(5, tmp_path) == (5, 3)


def sampled(driver: Driver) -> GpuSampler:
    """One that has asked every GPU: it is at its second round."""
    sampler = started(driver)
    driver.wait_rounds(len(driver.gpus) + 1)
    return sampler


def test_the_driver_tells_processes_and_names() -> None:
    driver = Driver(Gpu(processes=((os.getpid(), 4096), (1, None))), Gpu("GPU-2"))
    sampler = sampled(driver)
    registry = CollectorRegistry(auto_describe=False)
    engines: list[Any] = [served("big", os.getppid())]
    registry.register(InferenceCollector(list, gpus=lambda: sampler.samples))
    text = generate_latest(registry).decode()
    [first, second] = sampler.samples
    sampler.close()
    assert [(each.lineage[0], each.memory_bytes) for each in first.processes] == [(os.getpid(), 4096)]
    assert second.processes == ()
    assert memory([(first.uuid, first.processes)], engine_pids(engines)) == {("GPU-1", "big"): 4096}
    assert "sluice_gpu_process_memory_bytes" not in text
    info = 'sluice_gpu_info{driver_version="580.1",gpu_uuid="GPU-2",index="1",name="NVIDIA H100"} 1.0'
    assert info in text


def test_what_a_driver_hides_is_no_label() -> None:
    assert 'sluice_gpu_info{gpu_uuid="GPU-1",index="0"} 1.0' in page(GpuSample("GPU-1"))
