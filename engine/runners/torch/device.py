"""The device of the computation, its types, and the threads of the CPU."""

import numpy as np
import torch
from numpy.typing import NDArray

from sluice.engine.config import EngineConfig
from sluice.errors import ErrorCode, SluiceError, invalid
from sluice.machine import num_cores

DTYPES = {"bf16": torch.bfloat16, "f32": torch.float32, "float16": torch.float16}
"""torch's types, by the words of `EngineConfig.dtype`."""
CUDA_SHARE = 0.9
"""The part of a GPU's free memory that the KV cache takes where no option says it."""


def choose_device(asked: str) -> torch.device:
    """Return the device for `EngineConfig.device`. Raises INVALID for an unknown one, UNAVAILABLE for CUDA where torch
    finds no GPU."""
    has_cuda = torch.cuda.is_available()
    if asked == "auto":
        return torch.device("cuda" if has_cuda else "cpu")
    if asked not in ("cpu", "cuda"):
        raise invalid("device", f"device must be auto, cpu or cuda, got {asked!r}")
    if asked == "cuda" and not has_cuda:
        built = "without CUDA" if torch.version.cuda is None else f"for CUDA {torch.version.cuda}"
        message = f"device is cuda, but torch {torch.__version__}, built {built}, finds no GPU; use cpu or auto"
        raise SluiceError(ErrorCode.UNAVAILABLE, message, param="device")
    return torch.device(asked)


def choose_dtype(asked: str, device: torch.device) -> str:
    """Return the type of the computation. `auto` is bf16 on a GPU, and on a CPU that multiplies in it; there f32 is as
    fast on others, and exact. Raises INVALID for an unknown one."""
    if asked == "auto":
        return "bf16" if device.type == "cuda" or _multiplies_bf16() else "f32"
    if asked not in DTYPES:
        raise invalid("dtype", f"dtype must be auto, {', '.join(DTYPES)}, got {asked!r}")
    return asked


def check_cache_dtype(asked: str, dtype: str) -> None:
    """Raise INVALID for a cache of another type than that of the computation."""
    if asked not in ("auto", dtype):
        raise invalid(
            "kv_cache_dtype", f"kv_cache_dtype must be auto or {dtype}, as the computation is, on torch; got {asked!r}"
        )


def set_threads(config: EngineConfig) -> None:
    """Let torch take the configured number of threads. Raises INVALID for less than one."""
    if config.num_threads is not None and config.num_threads < 1:
        raise invalid("num_threads", f"num_threads must be at least 1, got {config.num_threads}")
    torch.set_num_threads(config.num_threads or num_cores())


def upload(array: NDArray[np.generic], device: torch.device) -> torch.Tensor:
    """Copy to the device; on the CPU it is the same memory. A GPU copies from pinned memory, so that the host does not
    wait until it comes to that. torch reuses such memory when it was copied."""
    tensor = torch.from_numpy(array)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


def describe(device: torch.device) -> str:
    """Return what decides how sums are rounded: the GPU's name, or the vector instructions of the CPU."""
    if device.type == "cuda":
        return str(torch.cuda.get_device_name(device))
    return f"cpu {torch.backends.cpu.get_cpu_capability()}"


def _multiplies_bf16() -> bool:
    return bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())
