"""With a small stand-in for NVIDIA's driver: there is none here, and it is not ours."""

import threading
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest
from prometheus_client import CollectorRegistry, generate_latest

from gateway.options.metrics_settings import MetricsSettings
from gateway.telemetry.gpu import GpuSample, GpuSampler
from gateway.telemetry.inference import InferenceCollector


class NVMLError(Exception):
    pass


@dataclass
class Gpu:
    """Units are the driver's: percent, bytes, milliwatts, millijoules."""

    uuid: str = "GPU-1"
    utilization: int = 40
    energy: int = 5_000_000
    hides_power: bool = False
    processes: tuple[tuple[int, int | None], ...] = ()
    """Id and used bytes."""


class Driver:
    """What is used of pynvml, for a thread; tells how often it was asked."""

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
            nvmlDeviceGetName=lambda gpu: b"NVIDIA H100",
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
            assert self.changed.wait_for(lambda: self.num_rounds >= count, timeout=10)


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
