"""The GPUs and their driver, asked of NVML once. A machine without is normal."""

from collections.abc import Callable
from types import ModuleType
from typing import Any

from cli.doctor.facts import Capability, Gpu, Gpus


def read_gpus(import_nvml: Callable[[], ModuleType] | None = None) -> Gpus:
    """`import_nvml` gives pynvml. Never raises for want of a GPU, a driver or its library."""
    nvml = (import_nvml or _import_pynvml)()
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        return Gpus(reason=f"NVIDIA's driver does not answer ({error})")
    try:
        return _read(nvml)
    except nvml.NVMLError as error:
        return Gpus(reason=f"NVIDIA's driver answers with an error ({error})")
    finally:
        nvml.nvmlShutdown()


def _read(nvml: ModuleType) -> Gpus:
    cuda = nvml.nvmlSystemGetCudaDriverVersion()
    gpus = tuple(_gpu(nvml, index) for index in range(nvml.nvmlDeviceGetCount()))
    return Gpus(
        driver_version=_text(nvml.nvmlSystemGetDriverVersion()),
        cuda_version=(cuda // 1000, cuda % 1000 // 10),
        gpus=gpus,
        reason="" if gpus else "the driver has no GPU",
    )


def _gpu(nvml: ModuleType, index: int) -> Gpu:
    handle = nvml.nvmlDeviceGetHandleByIndex(index)
    memory = nvml.nvmlDeviceGetMemoryInfo(handle)
    capability = _ask(nvml, nvml.nvmlDeviceGetCudaComputeCapability, handle)
    mode = _ask(nvml, nvml.nvmlDeviceGetMigMode, handle)
    return Gpu(
        index=index,
        name=_text(nvml.nvmlDeviceGetName(handle)),
        capability=None if capability is None else Capability(*capability),
        memory_total_bytes=memory.total,
        memory_free_bytes=memory.free,
        num_processes=len(_ask(nvml, nvml.nvmlDeviceGetComputeRunningProcesses, handle) or ()),
        is_partitioned=bool(mode and mode[0]),
    )


def _ask(nvml: ModuleType, question: Callable[[Any], Any], handle: Any) -> Any:
    """None for what this GPU does not tell."""
    try:
        return question(handle)
    except nvml.NVMLError:
        return None


def _text(value: bytes | str) -> str:
    return value.decode() if isinstance(value, bytes) else value


def _import_pynvml() -> ModuleType:
    import pynvml

    found: ModuleType = pynvml
    return found
