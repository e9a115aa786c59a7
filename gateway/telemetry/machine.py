"""The machine's processors, memory and GPUs as metric families.

Processors and memory come from Linux's /proc, GPUs from NVIDIA's driver. Without them there are no families, no error.
"""

import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from time import monotonic
from types import ModuleType
from typing import Any, Protocol, runtime_checkable

from prometheus_client.core import GaugeMetricFamily, Metric

from sluice.gateway.telemetry.families import COUNTER, GAUGE, Labels, build_family
from sluice.pipelines.llm.model import LlmModel
from sluice.serving.model import Model

log = logging.getLogger(__name__)
_PROC = Path("/proc")
_KIB = 1024
_MILLI = 0.001
_CLOSE_TIMEOUT_S = 5.0
_CPU_UTILIZATION = "nv_cpu_utilization"
_MEMORY_TOTAL, _MEMORY_USED = "nv_cpu_memory_total_bytes", "nv_cpu_memory_used_bytes"
_IDLE_FIELDS = slice(3, 5)
"""Fields of the first line of /proc/stat for idle time and for waiting on input or output."""
_BUSY_FIELDS = slice(0, 8)
"""Fields of that line for all time. Guests' time is left out, as the user's includes it."""
_PARENT_PID_FIELD = 1
"""Field of /proc/PID/stat, counted after the program's name."""


@dataclass(frozen=True, slots=True)
class GpuProcess:
    """A process that uses a GPU. `lineage` is its id, its parent's, and so on up to the first process."""

    lineage: tuple[int, ...]
    memory_bytes: int


@dataclass(frozen=True, slots=True)
class GpuSample:
    """One GPU's last known state; None where its driver gives no value."""

    uuid: str
    utilization: float | None = None
    memory_total_bytes: int | None = None
    memory_used_bytes: int | None = None
    power_usage_watts: float | None = None
    power_limit_watts: float | None = None
    energy_joules: float | None = None
    """Energy used since the server started."""
    index: int = 0
    name: str | None = None
    driver_version: str | None = None
    processes: tuple[GpuProcess, ...] = ()


ReadGpu = Callable[[GpuSample], float | None]
_GPU_FAMILIES: tuple[tuple[str, str, str, ReadGpu], ...] = (
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
_GPU_INFO = "sluice_gpu_info"
_PROCESS_MEMORY = "sluice_gpu_process_memory_bytes"
MACHINE_NAMES = frozenset({_CPU_UTILIZATION, _MEMORY_TOTAL, _MEMORY_USED, *(name for name, _, _, _ in _GPU_FAMILIES)})
"""Triton's families of the machine, whether or not they are shown."""


@dataclass(frozen=True, slots=True)
class HostMemory:
    total_bytes: int
    used_bytes: int


def host_memory(proc: Path = _PROC) -> HostMemory | None:
    """Read the memory that the machine has, and the part that new programs cannot get. None: no /proc."""
    try:
        lines = (proc / "meminfo").read_text().splitlines()
    except OSError:
        return None
    sizes = {name: int(rest.split()[0]) * _KIB for name, _, rest in (line.partition(":") for line in lines)}
    total = sizes["MemTotal"]
    return HostMemory(total, total - sizes["MemAvailable"])


class CpuUtilization:
    """How busy all processors were between two samples."""

    def __init__(self, proc: Path = _PROC) -> None:
        self._stat = proc / "stat"
        self._last = self._read()

    def sample(self) -> float | None:
        """Return the share of busy time since the last sample, from 0 to 1; None where it is unknown."""
        now, last = self._read(), self._last
        self._last = now
        if now is None or last is None:
            return None
        total = now[1] - last[1]
        return (now[0] - last[0]) / total if total > 0 else 0.0

    def _read(self) -> tuple[int, int] | None:
        """Return busy and whole time, in ticks since the host's start."""
        try:
            with self._stat.open() as file:
                fields = [int(field) for field in file.readline().split()[1:]]
        except OSError:
            return None
        total = sum(fields[_BUSY_FIELDS])
        return total - sum(fields[_IDLE_FIELDS]), total


class HostMetrics:
    """Triton's families of processors and memory, read again after `interval_s`: several scrapers see equal values."""

    def __init__(self, interval_s: float, proc: Path = _PROC, clock: Callable[[], float] = monotonic) -> None:
        self._interval_s = interval_s
        self._proc = proc
        self._clock = clock
        self._cpu = CpuUtilization(proc)
        self._utilization: float | None = None
        self._memory: HostMemory | None = None
        self._read_at: float | None = None

    def families(self) -> Iterator[Metric]:
        now = self._clock()
        if self._read_at is None or now - self._read_at >= self._interval_s:
            self._read_at = now
            self._utilization, self._memory = self._cpu.sample(), host_memory(self._proc)
        memory = self._memory
        if self._utilization is not None:
            yield GaugeMetricFamily(_CPU_UTILIZATION, "CPU utilization rate [0.0 - 1.0]", self._utilization)
        if memory is not None:
            yield GaugeMetricFamily(_MEMORY_TOTAL, "CPU total memory (RAM), in bytes", memory.total_bytes)
            yield GaugeMetricFamily(_MEMORY_USED, "CPU used memory (RAM), in bytes", memory.used_bytes)


def gpu_families(samples: Sequence[GpuSample]) -> Iterator[Metric]:
    """Yield the families of GPUs; none where there is no GPU."""
    if samples:
        for name, text, kind, read in _GPU_FAMILIES:
            yield build_family(name, text, kind, gpu_values(samples, read))
        yield build_family(_GPU_INFO, "1 for each GPU: what it is, and its driver.", GAUGE, map(_gpu_info, samples))


def _gpu_info(sample: GpuSample) -> tuple[Labels, float]:
    fields = {"name": sample.name, "driver_version": sample.driver_version}
    known = {label: value for label, value in fields.items() if value is not None}
    return {"gpu_uuid": sample.uuid, "index": str(sample.index), **known}, 1


def gpu_values(samples: Sequence[GpuSample], read: ReadGpu) -> Iterator[tuple[Labels, float]]:
    for sample in samples:
        value = read(sample)
        if value is not None:
            yield {"gpu_uuid": sample.uuid}, value


class GpuSampler:
    """Asks the driver every `interval_s`, on a thread of its own, as a driver may be slow."""

    def __init__(self, interval_s: float, import_nvml: Callable[[], ModuleType] | None = None) -> None:
        """`import_nvml` returns pynvml."""
        self._interval_s = interval_s
        self._import_nvml = import_nvml or _import_pynvml
        self.samples: tuple[GpuSample, ...] = ()
        """The last samples. May be read from any thread."""
        self._is_closing = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start the thread. To be called once."""
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
            log.debug("no GPU metrics: %s", error)
            return
        try:
            self._sample_on(nvml)
        except nvml.NVMLError as error:
            log.warning("GPU metrics have ended: %s", error)
        finally:
            self.samples = ()
            nvml.nvmlShutdown()

    def _sample_on(self, nvml: ModuleType) -> None:
        driver = _ask_driver(nvml, nvml.nvmlSystemGetDriverVersion)
        devices = [_Device(nvml, index, driver) for index in range(nvml.nvmlDeviceGetCount())]
        while devices:
            self.samples = tuple(device.sample() for device in devices)
            if self._is_closing.wait(self._interval_s):
                return


class _Device:
    """One GPU. Values that it hides (laptops hide their power, for one) are left out."""

    def __init__(self, nvml: ModuleType, index: int, driver_version: str | None) -> None:
        self._nvml = nvml
        self._index = index
        self._driver_version = driver_version
        self._handle = nvml.nvmlDeviceGetHandleByIndex(index)
        self._uuid: str = nvml.nvmlDeviceGetUUID(self._handle)
        self._name: str | None = self._ask(nvml.nvmlDeviceGetName)
        self._energy_at_start = self._ask(nvml.nvmlDeviceGetTotalEnergyConsumption)

    def _ask(self, question: Callable[[Any], Any]) -> Any:
        return _ask_driver(self._nvml, partial(question, self._handle))

    def sample(self) -> GpuSample:
        nvml = self._nvml
        rates = self._ask(nvml.nvmlDeviceGetUtilizationRates)
        memory = self._ask(nvml.nvmlDeviceGetMemoryInfo)
        energy = self._ask(nvml.nvmlDeviceGetTotalEnergyConsumption)
        has_energy = energy is not None and self._energy_at_start is not None
        return GpuSample(
            self._uuid,
            utilization=None if rates is None else rates.gpu / 100,
            memory_total_bytes=None if memory is None else memory.total,
            memory_used_bytes=None if memory is None else memory.used,
            power_usage_watts=_from_milli(self._ask(nvml.nvmlDeviceGetPowerUsage)),
            power_limit_watts=_from_milli(self._ask(nvml.nvmlDeviceGetPowerManagementLimit)),
            energy_joules=_from_milli(energy - self._energy_at_start) if has_energy else None,
            index=self._index,
            name=self._name,
            driver_version=self._driver_version,
            processes=tuple(self._processes()),
        )

    def _processes(self) -> Iterator[GpuProcess]:
        """Yield the GPU's processes. In a container the driver may hide how much memory each has."""
        for process in self._ask(self._nvml.nvmlDeviceGetComputeRunningProcesses) or ():
            if process.usedGpuMemory is not None:
                yield GpuProcess(find_lineage(process.pid), process.usedGpuMemory)


def _ask_driver(nvml: ModuleType, question: Callable[[], Any]) -> Any:
    try:
        return question()
    except nvml.NVMLError:
        return None


def _from_milli(value: float | None) -> float | None:
    return None if value is None else value * _MILLI


def _import_pynvml() -> ModuleType:
    import pynvml  # takes 0.1 s, on the thread that wants it

    found: ModuleType = pynvml
    return found


@runtime_checkable
class _HasProcesses(Protocol):
    """An engine in processes of its own; the ranks of a model that is spread over GPUs descend from them."""

    @property
    def pids(self) -> Sequence[int]: ...


def find_lineage(pid: int, proc: Path = _PROC) -> tuple[int, ...]:
    """Return `pid`, its parent's, and so on; `pid` alone where it has ended or is in another namespace."""
    found = [pid]
    while (parent := _parent(found[-1], proc)) > 0:
        found.append(parent)
    return tuple(found)


def _parent(pid: int, proc: Path) -> int:
    """Return the parent's id; 0 for the first process and for an unknown one."""
    try:
        text = (proc / str(pid) / "stat").read_text()
    except OSError:
        return 0
    return int(text.rpartition(")")[2].split()[_PARENT_PID_FIELD])


def engine_pids(models: Iterable[Model]) -> dict[int, str]:
    """Return the ids of the engines' processes, with the names of their models."""
    engines = ((model.engine, model.name) for model in models if isinstance(model, LlmModel))
    return {pid: name for engine, name in engines if isinstance(engine, _HasProcesses) for pid in engine.pids}


def process_memory(gpus: Sequence[tuple[str, Sequence[GpuProcess]]], engines: Mapping[int, str]) -> Iterator[Metric]:
    """Yield the GPU memory of each model's engine. `gpus` has pairs of uuid and processes."""
    values = list(_memory_by_model(gpus, engines))
    if values:
        yield build_family(_PROCESS_MEMORY, "GPU memory that the processes of a model's engine hold.", GAUGE, values)


def _memory_by_model(
    gpus: Sequence[tuple[str, Sequence[GpuProcess]]], engines: Mapping[int, str]
) -> Iterator[tuple[Labels, float]]:
    for uuid, processes in gpus:
        used: dict[str, int] = {}
        for process in processes:
            model = next((engines[pid] for pid in process.lineage if pid in engines), None)
            if model is not None:
                used[model] = used.get(model, 0) + process.memory_bytes
        for model, memory_bytes in used.items():
            yield {"gpu_uuid": uuid, "model": model}, memory_bytes
