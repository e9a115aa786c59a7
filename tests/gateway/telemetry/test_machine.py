"""The machine's families, with a stand-in for NVIDIA's driver."""

import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest
from prometheus_client import CollectorRegistry, generate_latest

from sluice.gateway.options.telemetry import MetricsSettings
from sluice.gateway.telemetry.machine import (
    CpuUtilization,
    GpuProcess,
    GpuSample,
    GpuSampler,
    HostMetrics,
    engine_pids,
    find_lineage,
    host_memory,
    process_memory,
)
from sluice.gateway.telemetry.page import InferenceCollector
from sluice.serving.model import Model
from tests.pipelines.llm.doubles import language_model
from tests.serving.batching.parts import AtOnceInstance, model_of
from tests.waiting import PATIENCE_S


class NVMLError(Exception):
    pass


@dataclass
class Gpu:
    """A GPU in the driver's units: percent, bytes, milliwatts, millijoules."""

    uuid: str = "GPU-1"
    utilization: int = 40
    energy: int = 5_000_000
    hides_power: bool = False
    processes: tuple[tuple[int, int | None], ...] = ()
    """Ids and used bytes of processes."""


class Driver:
    """The part of pynvml that the sampler uses. It counts samples."""

    def __init__(self, *gpus: Gpu, is_there: bool = True) -> None:
        self.gpus = gpus
        self.is_there = is_there
        self.num_rounds = 0
        self.is_shut_down = False
        self.changed = threading.Condition()

    def module(self) -> Any:
        return SimpleNamespace(
            NVMLError=NVMLError,
            nvmlInit=self._init,
            nvmlShutdown=self._shut_down,
            nvmlSystemGetDriverVersion=lambda: "580.1",
            nvmlDeviceGetName=lambda gpu: "NVIDIA H100",
            nvmlDeviceGetComputeRunningProcesses=lambda gpu: [
                SimpleNamespace(pid=pid, usedGpuMemory=used) for pid, used in gpu.processes
            ],
            nvmlDeviceGetCount=lambda: len(self.gpus),
            nvmlDeviceGetHandleByIndex=lambda index: self.gpus[index],
            nvmlDeviceGetUUID=lambda gpu: gpu.uuid,
            nvmlDeviceGetUtilizationRates=lambda gpu: SimpleNamespace(gpu=gpu.utilization),
            nvmlDeviceGetMemoryInfo=lambda gpu: SimpleNamespace(total=1 << 30, used=1 << 20),
            nvmlDeviceGetPowerUsage=self._power,
            nvmlDeviceGetPowerManagementLimit=lambda gpu: 300_000,
            nvmlDeviceGetTotalEnergyConsumption=lambda gpu: gpu.energy,
        )

    def _init(self) -> None:
        if not self.is_there:
            raise NVMLError("NVML Shared Library Not Found")

    def _shut_down(self) -> None:
        self.is_shut_down = True

    def _power(self, gpu: Gpu) -> int:
        with self.changed:
            self.num_rounds += 1
            self.changed.notify_all()
        if gpu.hides_power:
            raise NVMLError("Not Supported")
        return 120_500

    def wait_rounds(self, count: int) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: self.num_rounds >= count, timeout=PATIENCE_S)


def started(driver: Driver, interval_s: float = 0.001) -> GpuSampler:
    sampler = GpuSampler(interval_s, driver.module)
    sampler.start()
    return sampler


@pytest.fixture
def driver() -> Driver:
    return Driver(Gpu())


def page(*samples: GpuSample, aliases: bool = False) -> str:
    registry = CollectorRegistry(auto_describe=False)
    settings = MetricsSettings(has_triton_infer_aliases=aliases)
    registry.register(InferenceCollector(list, settings, gpus=lambda: samples))
    return generate_latest(registry).decode()


def test_a_gpu_is_asked_again_and_again(driver: Driver) -> None:
    sampler = started(driver)
    driver.wait_rounds(2)
    numbers = (0.4, 1 << 30, 1 << 20, 120.5, 300.0, 0.0)
    assert sampler.samples == (GpuSample("GPU-1", *numbers, name="NVIDIA H100", driver_version="580.1"),)
    driver.gpus[0].energy += 2500
    driver.wait_rounds(driver.num_rounds + 2)
    assert sampler.samples[0].energy_joules == 2.5
    sampler.close()
    sampler.close()
    assert driver.is_shut_down
    assert not sampler.samples


def test_closing_does_not_wait_for_the_interval(driver: Driver) -> None:
    sampler = started(driver, interval_s=3600)
    driver.wait_rounds(1)
    sampler.close()
    assert driver.is_shut_down
    assert driver.num_rounds == 1


def test_what_a_gpu_hides_is_left_out() -> None:
    driver = Driver(Gpu(), Gpu("GPU-2", hides_power=True))
    sampler = started(driver)
    driver.wait_rounds(4)
    text = page(*sampler.samples)
    sampler.close()
    assert 'nv_gpu_power_usage{gpu_uuid="GPU-1"} 120.5' in text
    assert 'nv_gpu_power_usage{gpu_uuid="GPU-2"}' not in text
    assert 'nv_gpu_power_limit{gpu_uuid="GPU-2"} 300.0' in text


def test_without_a_driver_there_is_nothing() -> None:
    sampler = started(Driver(is_there=False))
    sampler.close()
    assert sampler.samples == ()
    assert "gpu" not in page(*sampler.samples)


def test_the_stand_in_has_nothing_that_the_library_lacks(driver: Driver) -> None:
    for name in vars(driver.module()):
        assert hasattr(pynvml, name), name


def test_this_machines_driver_or_none_does_no_harm() -> None:
    sampler = GpuSampler(3600)
    sampler.close()
    sampler.start()
    sampler.close()
    assert sampler.samples == ()


def test_families_are_tritons() -> None:
    text = page(GpuSample("GPU-1", 0.25, 80, 8, 100.0, 300.0, 12.0))
    for line in (
        "# TYPE nv_gpu_utilization gauge",
        'nv_gpu_utilization{gpu_uuid="GPU-1"} 0.25',
        'nv_gpu_memory_total_bytes{gpu_uuid="GPU-1"} 80.0',
        'nv_gpu_memory_used_bytes{gpu_uuid="GPU-1"} 8.0',
        'nv_gpu_power_usage{gpu_uuid="GPU-1"} 100.0',
        'nv_gpu_power_limit{gpu_uuid="GPU-1"} 300.0',
        "# TYPE nv_energy_consumption counter",
        'nv_energy_consumption{gpu_uuid="GPU-1"} 12.0',
    ):
        assert line in text.splitlines()
    assert "triton_gpu_utilization" not in text


def test_the_alias_is_in_percent() -> None:
    assert 'triton_gpu_utilization{gpu_uuid="GPU-1"} 25.0' in page(GpuSample("GPU-1", 0.25), aliases=True)


def served(name: str, *pids: int) -> Model:
    """A language model whose engines' processes have these ids; none before their start."""
    return language_model(SimpleNamespace(engine=SimpleNamespace(pids=pids)), name)


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
    assert engine_pids([other, threaded, served("early"), served("big", 10, 11)]) == {10: "big", 11: "big"}


def test_a_lineage_ends_with_the_first_process() -> None:
    found = find_lineage(os.getpid())
    assert found[:2] == (os.getpid(), os.getppid())
    assert len(set(found)) == len(found)


def test_a_process_that_is_not_there_stands_alone(tmp_path: Path) -> None:
    assert find_lineage(5, tmp_path) == (5,)


def test_a_programs_name_may_have_anything_in_it(tmp_path: Path) -> None:
    (tmp_path / "5").mkdir()
    (tmp_path / "5" / "stat").write_text("5 (a) b (c) S 3 5 5 0 -1")
    assert find_lineage(5, tmp_path) == (5, 3)


def sampled(driver: Driver) -> GpuSampler:
    """Return a sampler that has sampled every GPU: the driver is asked for the second round."""
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


def test_the_host_is_read_from_proc(tmp_path: Path) -> None:
    stat = tmp_path / "stat"
    stat.write_text("cpu  100 0 100 700 100 0 0 0 50 0\ncpu0 1 2 3\n")
    utilization = CpuUtilization(tmp_path)
    stat.write_text("cpu  130 0 100 760 110 0 0 0 90 0\ncpu0 1 2 3\n")
    assert utilization.sample() == pytest.approx(0.3)
    assert utilization.sample() == 0.0
    (tmp_path / "meminfo").write_text("MemTotal: 1000 kB\nMemFree: 1 kB\nMemAvailable: 400 kB\nHugePages_Total: 0\n")
    memory = host_memory(tmp_path)
    assert memory is not None
    assert (memory.total_bytes, memory.used_bytes) == (1000 * 1024, 600 * 1024)


def test_a_host_without_proc_has_no_numbers(tmp_path: Path) -> None:
    assert host_memory(tmp_path) is None
    assert CpuUtilization(tmp_path).sample() is None


def test_the_host_is_read_once_an_interval(tmp_path: Path) -> None:
    stat, now = tmp_path / "stat", 100.0
    stat.write_text("cpu  100 0 100 800 0 0 0 0 0 0\n")
    metrics = HostMetrics(2.0, tmp_path, lambda: now)

    def utilization() -> float:
        return next(iter(metrics.families())).samples[0].value

    stat.write_text("cpu  150 0 100 850 0 0 0 0 0 0\n")
    assert utilization() == 0.5
    stat.write_text("cpu  150 0 100 950 0 0 0 0 0 0\n")
    now += 1.9
    assert utilization() == 0.5
    now += 0.1
    assert utilization() == 0.0
