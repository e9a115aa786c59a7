"""The GPUs that the driver shows, and what they can."""

from dataclasses import dataclass

import pynvml

Capability = tuple[int, int]
"""Major and minor, as in 8.6."""


@dataclass(frozen=True, slots=True)
class Gpu:
    name: str
    capability: Capability


def installed_gpus() -> list[Gpu]:
    """In the driver's order, which is CUDA's with CUDA_DEVICE_ORDER=PCI_BUS_ID; empty without a driver.

    Asks the driver: for a thread.
    """
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return []
    try:
        return [_gpu(pynvml.nvmlDeviceGetHandleByIndex(index)) for index in range(pynvml.nvmlDeviceGetCount())]
    finally:
        pynvml.nvmlShutdown()


def _gpu(handle: object) -> Gpu:
    major, minor = pynvml.nvmlDeviceGetCudaComputeCapability(handle)
    return Gpu(str(pynvml.nvmlDeviceGetName(handle)), (major, minor))


def capability_text(capability: Capability) -> str:
    """As config.pbtxt has it: 8.6."""
    return f"{capability[0]}.{capability[1]}"
