"""Objects of the installed library's classes, and what this version of it lacks."""

from collections.abc import Mapping
from typing import Any

from engine.delegated.tensorrt_llm.configuration.catalogue.speculation import DECODING_TYPES
from engine.delegated.tensorrt_llm.configuration.settings import SETTINGS, Setting, near
from engine.delegated.tensorrt_llm.configuration.wishes import Wishes
from engine.delegated.tensorrt_llm.library import Library, field_names
from engine.delegated.tensorrt_llm.versions import is_in, those_with
from sluice.errors import ErrorCode, SluiceError, invalid

SPECULATION = "speculative_config"

CLASSES = {
    "kv_cache_config": "KvCacheConfig",
    "scheduler_config": "SchedulerConfig",
    "scheduler_config.dynamic_batch_config": "DynamicBatchConfig",
    "cuda_graph_config": "CudaGraphConfig",
    "attention_dp_config": "AttentionDpConfig",
    "torch_compile_config": "TorchCompileConfig",
    "moe_config": "MoeConfig",
    "nvfp4_gemm_config": "Nvfp4GemmConfig",
    "peft_cache_config": "PeftCacheConfig",
    "lora_config": "LoraConfig",
    "cache_transceiver_config": "CacheTransceiverConfig",
    "kv_connector_config": "KvCacheConnectorConfig",
    "extended_runtime_perf_knob_config": "ExtendedRuntimePerfKnobConfig",
    "quant_config": "QuantConfig",
    "calib_config": "CalibConfig",
    "build_config": "BuildConfig",
}
"""Sub-configurations and their classes, but for speculation, where a field says which."""

SUB_CONFIGS = frozenset({*CLASSES, SPECULATION})

ENUMS = {
    "scheduler_config.capacity_scheduler_policy": "CapacitySchedulerPolicy",
    "scheduler_config.context_chunking_policy": "ContextChunkingPolicy",
    "batching_type": "BatchingType",
    "quant_config.quant_algo": "QuantAlgo",
    "quant_config.kv_cache_quant_algo": "QuantAlgo",
}
"""Fields whose values are members of an enumeration, by name."""

_DEFAULTS = {
    "scheduler_config.dynamic_batch_config": {
        "enable_batch_size_tuning": True,
        "enable_max_num_tokens_tuning": False,
        "dynamic_batch_moving_average_window": 128,
    }
}
"""Where older versions demand every field of a class, what newer ones have as defaults."""

_ROWS: Mapping[str, Setting] = {row.target: row for row in SETTINGS.values() if row.target}


def check_versions(wishes: Wishes, library: Library, *, is_engine: bool) -> None:
    """Raises SluiceError UNIMPLEMENTED for the first argument that the installed version lacks, naming those that have
    it; INVALID for one that no version has."""
    known = library.arguments(is_engine=is_engine)
    for target, wish in wishes.items():
        row = _ROWS.get(target)
        if row is not None:
            _check_row(row, wish.origin, library, is_engine=is_engine)
        parent, _, name = target.rpartition(".")
        names = known if not parent else _fields(parent, library, wishes)
        if name not in names:
            raise _lacking(target, wish.origin, names, library, is_engine=is_engine)


def _check_row(row: Setting, origin: str, library: Library, *, is_engine: bool) -> None:
    if not is_in(library.version, row.since, row.until):
        message = f"TensorRT-LLM {library.version} has no {row.target}: {those_with(row.since, row.until)}"
        raise SluiceError(ErrorCode.UNIMPLEMENTED, f"{origin} cannot be used: {message}", param=origin)
    if row.engines_only and not is_engine:
        message = f"only compiled engines (TensorRT-LLM before 1.3) have {row.target}; this model runs on PyTorch"
        raise invalid(origin, f"{origin} cannot be used: {message}")
    if row.pytorch_only and is_engine:
        message = f"only the PyTorch backend has {row.target}, and this model is run as a compiled engine"
        raise invalid(origin, f"{origin} cannot be used: {message}")


def _fields(parent: str, library: Library, wishes: Wishes) -> frozenset[str]:
    return field_names(_class(parent, wishes.get(f"{SPECULATION}.decoding_type", ""), library)) | (
        {"decoding_type"} if parent == SPECULATION else set()
    )


def _class(path: str, decoding_type: str, library: Library) -> Any:
    name = DECODING_TYPES[decoding_type] if path == SPECULATION else CLASSES[path]
    cls = library.find(name)
    if cls is None:
        message = f"TensorRT-LLM {library.version} has no {name}, which {path} is made of"
        raise SluiceError(ErrorCode.UNIMPLEMENTED, message, param=path)
    return cls


def _lacking(target: str, origin: str, names: frozenset[str], library: Library, *, is_engine: bool) -> SluiceError:
    if "." not in target and target in library.arguments(is_engine=not is_engine):
        other = "the PyTorch backend" if is_engine else "compiled engines"
        return invalid(origin, f"{origin} cannot be used: only {other} have the argument {target}")
    message = f"TensorRT-LLM {library.version} has no argument {target}"
    if target in _ROWS:
        return SluiceError(ErrorCode.UNIMPLEMENTED, f"{origin} cannot be used: {message}, as others do", param=origin)
    return invalid(origin, f"{message}{near(target.rpartition('.')[2], names)}")


def build(wishes: Wishes, library: Library) -> dict[str, Any]:
    """Keyword arguments of the LLM class. Raises SluiceError INVALID for what a class refuses."""
    return {name: _built(name, value, library) for name, value in wishes.nested().items()}


def _built(path: str, value: Any, library: Library) -> Any:
    if path in ENUMS and isinstance(value, str):
        return _member(path, value, library)
    if path not in SUB_CONFIGS or not isinstance(value, dict):
        return value
    given = {name: _built(f"{path}.{name}", inner, library) for name, inner in value.items()}
    decoding_type = given.pop("decoding_type", "")
    cls = _class(path, decoding_type, library)
    try:
        return cls(**{**_DEFAULTS.get(path, {}), **given})
    except (ValueError, TypeError, AssertionError) as error:  # pydantic's is a ValueError; some classes assert
        raise invalid(path, f"TensorRT-LLM {library.version} refuses {path}: {_reason(error)}") from error


def _member(path: str, name: str, library: Library) -> Any:
    enum = library.find(ENUMS[path])
    if enum is None:
        return name
    try:
        return enum[name]
    except KeyError:
        names = ", ".join(enum.__members__)
        raise invalid(path, f"{path} must be one of {names} in TensorRT-LLM {library.version}, got {name!r}") from None


def _reason(error: Exception) -> str:
    return " ".join(str(error).split())
