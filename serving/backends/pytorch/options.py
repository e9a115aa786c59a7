"""The backend's parameters in config.pbtxt, in the names of Triton's backend."""

from dataclasses import dataclass

from tritonclient.grpc.model_config_pb2 import ModelConfig

from sluice.errors import ErrorCode, SluiceError

_BOOLEANS = {"true": True, "on": True, "1": True, "false": False, "off": False, "0": False}
_UNOBEYED = {
    "ENABLE_NVFUSER": "NVFuser is no longer part of PyTorch",
    "TORCH_COMPILE_OPTIONAL_PARAMETERS": "models are served as they were compiled",
}


@dataclass(frozen=True, slots=True)
class TorchOptions:
    """None leaves PyTorch's own choice.

    `jit_profiling`, `jit_executor`, `tensor_fuser` and `has_cudnn` are switches of the whole process, set before every
    run. `shares_weights`: a device's instances have one module between them, else each its own.
    """

    is_optimized: bool = True
    uses_inference_mode: bool = True
    has_cudnn: bool = True
    cleans_cache: bool = False
    shares_weights: bool = False
    jit_profiling: bool | None = None
    jit_executor: bool | None = None
    tensor_fuser: bool | None = None
    intra_op_threads: int | None = None
    inter_op_threads: int | None = None


def options_of(config: ModelConfig) -> TorchOptions:
    """Raises SluiceError INVALID for values that there are not."""
    given = {key: parameter.string_value for key, parameter in config.parameters.items()}
    return TorchOptions(
        is_optimized=not _switch(given, "DISABLE_OPTIMIZED_EXECUTION", False),
        uses_inference_mode=_switch(given, "INFERENCE_MODE", True),
        has_cudnn=not _switch(given, "DISABLE_CUDNN", False),
        cleans_cache=_switch(given, "ENABLE_CACHE_CLEANING", False),
        shares_weights=_switch(given, "ENABLE_WEIGHT_SHARING", False),
        jit_profiling=_choice(given, "ENABLE_JIT_PROFILING"),
        jit_executor=_choice(given, "ENABLE_JIT_EXECUTOR"),
        tensor_fuser=_choice(given, "ENABLE_TENSOR_FUSER"),
        intra_op_threads=_count(given, "INTRA_OP_THREAD_COUNT", "NUM_THREADS"),
        inter_op_threads=_count(given, "INTER_OP_THREAD_COUNT", "NUM_INTEROP_THREADS"),
    )


def unobeyed_parameters(config: ModelConfig) -> list[str]:
    """What Triton's backend knows or knew and this one does not do, each with the reason."""
    return [f"{key} ({reason})" for key, reason in _UNOBEYED.items() if key in config.parameters]


def _switch(given: dict[str, str], key: str, default: bool) -> bool:
    chosen = _choice(given, key)
    return default if chosen is None else chosen


def _choice(given: dict[str, str], key: str) -> bool | None:
    if key not in given:
        return None
    if given[key].lower() not in _BOOLEANS:
        raise _wrong(key, f"failed to convert '{given[key]}' to boolean")
    return _BOOLEANS[given[key].lower()]


def _count(given: dict[str, str], *keys: str) -> int | None:
    """Of the first key that is there. 0 and less are PyTorch's own choice."""
    for key in keys:
        if key in given:
            try:
                return max(int(given[key]), 0) or None
            except ValueError:
                raise _wrong(key, f"failed to convert '{given[key]}' to integral number") from None
    return None


def _wrong(key: str, reason: str) -> SluiceError:
    return SluiceError(ErrorCode.INVALID, f"parameter '{key}': {reason}")
