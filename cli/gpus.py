"""Reads NVIDIA's driver and the GPUs of this machine through NVML."""

from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any, NamedTuple


class ComputeCapability(NamedTuple):
    """A GPU's compute capability."""

    major: int
    minor: int

    def __str__(self) -> str:
        return f"{self.major}.{self.minor}"


@dataclass(frozen=True, slots=True)
class GpuFacts:
    """A GPU as NVML reports it."""

    index: int
    name: str
    capability: ComputeCapability | None
    memory_total_bytes: int
    memory_free_bytes: int
    num_processes: int = 0
    """Number of processes that hold memory of this GPU now."""
    is_partitioned: bool = False
    """Whether MIG is on. CUDA then shows its slices instead of the GPU."""


@dataclass(frozen=True, slots=True)
class NvidiaDriver:
    """NVIDIA's driver and the GPUs it finds. `reason` says why there are none."""

    version: str = ""
    cuda_version: tuple[int, int] | None = None
    """The newest CUDA that the driver runs."""
    gpus: tuple[GpuFacts, ...] = ()
    reason: str = ""


def read_driver(import_nvml: Callable[[], ModuleType] | None = None) -> NvidiaDriver:
    """Read the driver and its GPUs through NVML. A machine without GPU, driver or NVML is no error.

    `import_nvml` returns the module pynvml.
    """
    nvml = (import_nvml or _import_pynvml)()
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        return NvidiaDriver(reason=f"NVIDIA's driver does not answer ({error})")
    try:
        return _read_initialized(nvml)
    except nvml.NVMLError as error:
        return NvidiaDriver(reason=f"NVIDIA's driver answers with an error ({error})")
    finally:
        nvml.nvmlShutdown()


def _read_initialized(nvml: ModuleType) -> NvidiaDriver:
    cuda = nvml.nvmlSystemGetCudaDriverVersion()
    gpus = tuple(_read_gpu(nvml, index) for index in range(nvml.nvmlDeviceGetCount()))
    return NvidiaDriver(
        version=_decode(nvml.nvmlSystemGetDriverVersion()),
        cuda_version=(cuda // 1000, cuda % 1000 // 10),
        gpus=gpus,
        reason="" if gpus else "the driver has no GPU",
    )


def _read_gpu(nvml: ModuleType, index: int) -> GpuFacts:
    handle = nvml.nvmlDeviceGetHandleByIndex(index)
    memory = nvml.nvmlDeviceGetMemoryInfo(handle)
    capability = _query(nvml, nvml.nvmlDeviceGetCudaComputeCapability, handle)
    mode = _query(nvml, nvml.nvmlDeviceGetMigMode, handle)
    return GpuFacts(
        index=index,
        name=_decode(nvml.nvmlDeviceGetName(handle)),
        capability=None if capability is None else ComputeCapability(*capability),
        memory_total_bytes=memory.total,
        memory_free_bytes=memory.free,
        num_processes=len(_query(nvml, nvml.nvmlDeviceGetComputeRunningProcesses, handle) or ()),
        is_partitioned=bool(mode and mode[0]),
    )


def _query(nvml: ModuleType, function: Callable[[Any], Any], handle: Any) -> Any:
    """Call an NVML function. Returns None where this GPU does not support it."""
    try:
        return function(handle)
    except nvml.NVMLError:
        return None


def _decode(value: bytes | str) -> str:
    return value.decode() if isinstance(value, bytes) else value


def _import_pynvml() -> ModuleType:
    import pynvml

    module: ModuleType = pynvml
    return module
