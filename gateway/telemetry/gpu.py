"""The GPUs' state, asked of NVIDIA's driver now and then; where there is none, there are no numbers and no error."""

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Any

from prometheus_client.core import Metric

from gateway.telemetry.families import COUNTER, GAUGE, Labels, family
from gateway.telemetry.gpu_processes import GpuProcess, lineage

_log = logging.getLogger(__name__)

_MILLI = 0.001
_CLOSE_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True)
class GpuSample:
    """One GPU's last known state; None is what its driver does not tell."""

    uuid: str
    utilization: float | None = None
    memory_total_bytes: int | None = None
    memory_used_bytes: int | None = None
    power_usage_watts: float | None = None
    power_limit_watts: float | None = None
    energy_joules: float | None = None
    """Since the server started."""
    index: int = 0
    name: str | None = None
    driver_version: str | None = None
    processes: tuple[GpuProcess, ...] = ()


Read = Callable[[GpuSample], float | None]

_FAMILIES: tuple[tuple[str, str, str, Read], ...] = (
    ("nv_gpu_utilization", "GPU utilization rate [0.0 - 1.0)", GAUGE, lambda g: g.utilization),
    ("nv_gpu_memory_total_bytes", "GPU total memory, in bytes", GAUGE, lambda g: g.memory_total_bytes),
    ("nv_gpu_memory_used_bytes", "GPU used memory, in bytes", GAUGE, lambda g: g.memory_used_bytes),
    ("nv_gpu_power_usage", "GPU power usage in watts", GAUGE, lambda g: g.power_usage_watts),
    ("nv_gpu_power_limit", "GPU power management limit in watts", GAUGE, lambda g: g.power_limit_watts),
    (
        "nv_energy_consumption",
        "GPU energy consumption in joules since the Triton Server started",
        COUNTER,
        lambda g: g.energy_joules,
    ),
)
_INFO = "sluice_gpu_info"
NAMES = frozenset(name for name, _, _, _ in _FAMILIES)


def gpu_families(samples: Sequence[GpuSample]) -> Iterator[Metric]:
    """Nothing where there is no GPU."""
    if samples:
        for name, text, kind, read in _FAMILIES:
            yield family(name, text, kind, gpu_values(samples, read))
        yield family(_INFO, "1 for each GPU: what it is, and its driver.", GAUGE, map(_info, samples))


def _info(sample: GpuSample) -> tuple[Labels, float]:
    told = {"name": sample.name, "driver_version": sample.driver_version}
    known = {label: value for label, value in told.items() if value is not None}
    return {"gpu_uuid": sample.uuid, "index": str(sample.index), **known}, 1


def gpu_values(samples: Sequence[GpuSample], read: Read) -> Iterator[tuple[Labels, float]]:
    for sample in samples:
        value = read(sample)
        if value is not None:
            yield {"gpu_uuid": sample.uuid}, value


class GpuSampler:
    """Asks every `interval_s`, on a thread of its own: a driver may take its time."""

    def __init__(self, interval_s: float, import_nvml: Callable[[], ModuleType] | None = None) -> None:
        """`import_nvml` gives pynvml."""
        self._interval_s = interval_s
        self._import_nvml = import_nvml or _import_pynvml
        self._samples: tuple[GpuSample, ...] = ()
        self._is_closing = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def samples(self) -> tuple[GpuSample, ...]:
        """What was said last. From any thread."""
        return self._samples

    def start(self) -> None:
        """Begin. Once."""
        self._thread = threading.Thread(target=self._run, name="gpu-sampler", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread. Idempotent, and harmless where it was never started."""
        self._is_closing.set()
        if self._thread is not None:
            self._thread.join(_CLOSE_TIMEOUT_S)

    def _run(self) -> None:
        nvml = self._import_nvml()
        try:
            nvml.nvmlInit()
        except nvml.NVMLError as error:
            _log.debug("no GPU metrics: %s", error)
            return
        try:
            self._sample_on(nvml)
        except nvml.NVMLError as error:
            _log.warning("GPU metrics have ended: %s", error)
        finally:
            self._samples = ()
            nvml.nvmlShutdown()

    def _sample_on(self, nvml: ModuleType) -> None:
        driver = _asked(nvml, nvml.nvmlSystemGetDriverVersion)
        devices = [_Device(nvml, index, _text(driver)) for index in range(nvml.nvmlDeviceGetCount())]
        while devices:
            self._samples = tuple(device.sample() for device in devices)
            if self._is_closing.wait(self._interval_s):
                return


class _Device:
    """One GPU. What it does not tell (laptops hide their power, for one) is left out."""

    def __init__(self, nvml: ModuleType, index: int, driver_version: str | None) -> None:
        self._nvml = nvml
        self._index = index
        self._driver_version = driver_version
        self._handle = nvml.nvmlDeviceGetHandleByIndex(index)
        self._uuid = _text(nvml.nvmlDeviceGetUUID(self._handle)) or ""
        self._name = _text(self._ask(nvml.nvmlDeviceGetName))
        self._energy_at_start = self._ask(nvml.nvmlDeviceGetTotalEnergyConsumption)

    def _ask(self, question: Callable[[Any], Any]) -> Any:
        return _asked(self._nvml, partial(question, self._handle))

    def sample(self) -> GpuSample:
        nvml, scaled = self._nvml, partial(_scaled, factor=_MILLI)
        rates = self._ask(nvml.nvmlDeviceGetUtilizationRates)
        memory = self._ask(nvml.nvmlDeviceGetMemoryInfo)
        energy = self._ask(nvml.nvmlDeviceGetTotalEnergyConsumption)
        has_energy = energy is not None and self._energy_at_start is not None
        return GpuSample(
            self._uuid,
            utilization=None if rates is None else rates.gpu / 100,
            memory_total_bytes=None if memory is None else memory.total,
            memory_used_bytes=None if memory is None else memory.used,
            power_usage_watts=scaled(self._ask(nvml.nvmlDeviceGetPowerUsage)),
            power_limit_watts=scaled(self._ask(nvml.nvmlDeviceGetPowerManagementLimit)),
            energy_joules=scaled(energy - self._energy_at_start) if has_energy else None,
            index=self._index,
            name=self._name,
            driver_version=self._driver_version,
            processes=tuple(self._processes()),
        )

    def _processes(self) -> Iterator[GpuProcess]:
        """In a container the driver may hide whose memory is whose."""
        for process in self._ask(self._nvml.nvmlDeviceGetComputeRunningProcesses) or ():
            if process.usedGpuMemory is not None:
                yield GpuProcess(lineage(process.pid), process.usedGpuMemory)


def _asked(nvml: ModuleType, question: Callable[[], Any]) -> Any:
    try:
        return question()
    except nvml.NVMLError:
        return None


def _text(value: Any) -> str | None:
    """Older bindings give bytes."""
    return value.decode() if isinstance(value, bytes) else value


def _scaled(value: float | None, factor: float) -> float | None:
    return None if value is None else value * factor


def _import_pynvml() -> ModuleType:
    import pynvml  # takes 0.1 s, on the thread that wants it

    found: ModuleType = pynvml
    return found
