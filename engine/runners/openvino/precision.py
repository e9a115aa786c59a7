"""In which types the CPU plugin computes and keeps the KV cache."""

from typing import Any

import openvino as ov

from engine.config import EngineConfig
from sluice.errors import invalid

DEVICE = "CPU"
_COMPUTE_TYPES = {"bf16": ov.Type.bf16, "f32": ov.Type.f32}
_CACHE_TYPES = {**_COMPUTE_TYPES, "u8": ov.Type.u8}


def cpu_capabilities() -> tuple[str, ...]:
    """What the CPU computes in natively, in the plugin's words: FP32, BF16, INT8, ..."""
    return tuple(ov.Core().get_property(DEVICE, "OPTIMIZATION_CAPABILITIES"))


def choose_dtype(dtype: str, core: ov.Core) -> str:
    """The type of the computation. Raises SluiceError(INVALID) for one that is unknown or that the CPU lacks."""
    has_bf16 = "BF16" in core.get_property(DEVICE, "OPTIMIZATION_CAPABILITIES")
    if dtype == "auto":
        return "bf16" if has_bf16 else "f32"
    if dtype not in _COMPUTE_TYPES:
        raise invalid("dtype", f"dtype must be auto, {' or '.join(_COMPUTE_TYPES)}, got {dtype!r}")
    if dtype == "bf16" and not has_bf16:
        raise invalid("dtype", "dtype is bf16, which this CPU does not have; use f32 or auto")
    return dtype


def choose_cache_dtype(kv_cache_dtype: str, dtype: str) -> str:
    """The type of cached keys and values, for a computation in `dtype`: the same or u8, all that the kernels have.

    Raises SluiceError(INVALID) for others.
    """
    if kv_cache_dtype == "auto":
        return dtype
    if kv_cache_dtype not in _CACHE_TYPES:
        known = ", ".join(_CACHE_TYPES)
        raise invalid("kv_cache_dtype", f"kv_cache_dtype must be one of auto, {known}, got {kv_cache_dtype!r}")
    if kv_cache_dtype not in (dtype, "u8"):
        raise invalid(
            "kv_cache_dtype",
            f"kv_cache_dtype must be {dtype}, as the computation is, or u8, got {kv_cache_dtype}; dtype sets the "
            "computation's type",
        )
    return kv_cache_dtype


def properties(config: EngineConfig, dtype: str, cache_dtype: str) -> dict[str, Any]:
    """What the plugin is told at compile. Raises SluiceError(INVALID) for a number of threads under 1."""
    told: dict[str, Any] = {
        "PERFORMANCE_HINT": "LATENCY",
        "INFERENCE_PRECISION_HINT": _COMPUTE_TYPES[dtype],
        "KV_CACHE_PRECISION": _CACHE_TYPES[cache_dtype],
    }
    if config.num_threads is not None:
        if config.num_threads < 1:
            raise invalid("num_threads", f"num_threads must be at least 1, got {config.num_threads}")
        told["INFERENCE_NUM_THREADS"] = config.num_threads
    return told
