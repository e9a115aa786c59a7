"""The library's classes that arguments are made of: what this version of it lacks, the objects, and how they read."""

import re
from enum import Enum
from typing import Any

from engine.delegated.tensorrt_llm.configuration.arguments import ArgumentSet, Resolution
from engine.delegated.tensorrt_llm.configuration.catalogue import DECODING_TYPES, ENGINES, PYTORCH, SETTINGS
from engine.delegated.tensorrt_llm.configuration.speculation import SPECULATION
from engine.delegated.tensorrt_llm.library import TensorRtLlmLibrary, field_names, is_in, versions_in_words
from engine.runtime_settings import RuntimeSetting, nearest_names
from sluice.errors import ErrorCode, SluiceError, invalid

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
"""The defaults that newer versions have, where older ones demand every field of a class."""

_ROWS = {row.target: row for row in SETTINGS.values() if row.target}


# -- what this version lacks


def check_versions(resolution: Resolution) -> None:
    """Raise UNIMPLEMENTED for the first argument that the installed version lacks, naming those that have it; INVALID
    for one that no version has, naming those that are near."""
    library, arguments = resolution.library, resolution.arguments
    known = library.arguments(is_engine=resolution.is_engine)
    for target, argument in arguments.items():
        if target in _ROWS:
            _check_row(_ROWS[target], argument.origin, resolution)
        parent, _, name = target.rpartition(".")
        names = _fields(parent, library, arguments) if parent else known
        if name not in names:
            raise _lacking(target, argument.origin, names, resolution)


def _check_row(row: RuntimeSetting, origin: str, resolution: Resolution) -> None:
    version = resolution.library.version
    if not is_in(version, row.since, row.until):
        message = f"TensorRT-LLM {version} has no {row.target}: {versions_in_words(row.since, row.until)}"
        raise SluiceError(ErrorCode.UNIMPLEMENTED, f"{origin} cannot be used: {message}", param=origin)
    if row.backend == ENGINES and not resolution.is_engine:
        message = f"only compiled engines (TensorRT-LLM before 1.3) have {row.target}; this model runs on PyTorch"
        raise invalid(origin, f"{origin} cannot be used: {message}")
    if row.backend == PYTORCH and resolution.is_engine:
        message = f"only the PyTorch backend has {row.target}, and this model is run as a compiled engine"
        raise invalid(origin, f"{origin} cannot be used: {message}")


def _fields(parent: str, library: TensorRtLlmLibrary, arguments: ArgumentSet) -> frozenset[str]:
    names = field_names(_class(parent, arguments.get(f"{SPECULATION}.decoding_type", ""), library))
    return names | {"decoding_type"} if parent == SPECULATION else names


def _class(path: str, decoding_type: str, library: TensorRtLlmLibrary) -> Any:
    name = DECODING_TYPES[decoding_type] if path == SPECULATION else CLASSES[path]
    cls = library.find(name)
    if cls is None:
        message = f"TensorRT-LLM {library.version} has no {name}, which {path} is made of"
        raise SluiceError(ErrorCode.UNIMPLEMENTED, message, param=path)
    return cls


def _lacking(target: str, origin: str, names: frozenset[str], resolution: Resolution) -> SluiceError:
    library, is_engine = resolution.library, resolution.is_engine
    if "." not in target and target in library.arguments(is_engine=not is_engine):
        other = "the PyTorch backend" if is_engine else "compiled engines"
        return invalid(origin, f"{origin} cannot be used: only {other} have the argument {target}")
    message = f"TensorRT-LLM {library.version} has no argument {target}"
    if target in _ROWS:
        return SluiceError(ErrorCode.UNIMPLEMENTED, f"{origin} cannot be used: {message}, as others do", param=origin)
    return invalid(origin, f"{message}{nearest_names(target.rpartition('.')[2], names)}")


# -- objects


def build_arguments(arguments: ArgumentSet, library: TensorRtLlmLibrary) -> dict[str, Any]:
    """Return keyword arguments of the LLM class. Raises SluiceError INVALID for what a class refuses."""
    return {name: _build(name, value, library) for name, value in arguments.nested().items()}


def _build(path: str, value: Any, library: TensorRtLlmLibrary) -> Any:
    if path in ENUMS and isinstance(value, str):
        return _member(path, value, library)
    if path not in SUB_CONFIGS or not isinstance(value, dict):
        return value
    given = {name: _build(f"{path}.{name}", inner, library) for name, inner in value.items()}
    cls = _class(path, given.pop("decoding_type", ""), library)
    try:
        return cls(**{**_DEFAULTS.get(path, {}), **given})
    except (ValueError, TypeError, AssertionError) as error:  # pydantic's is a ValueError; some classes assert
        reason = " ".join(str(error).split())
        raise invalid(path, f"TensorRT-LLM {library.version} refuses {path}: {reason}") from error


def _member(path: str, name: str, library: TensorRtLlmLibrary) -> Any:
    enum = library.find(ENUMS[path])
    if enum is None:
        return name
    try:
        return enum[name]
    except KeyError:
        names = ", ".join(enum.__members__)
        raise invalid(path, f"{path} must be one of {names} in TensorRT-LLM {library.version}, got {name!r}") from None


# -- how they read

_SECRET = re.compile(r"token(?!s|iz|_id|_length)|secret|password|api_?key|credential", re.IGNORECASE)
_WITHHELD = frozenset({"env_overrides"})


def as_python(name: str, arguments: dict[str, Any]) -> str:
    """Return a call as Python code: `LLM(model='...', max_beam_width=2)`. What looks like a secret is left out."""
    return f"{name}({', '.join(f'{key}={_shown(key, value)}' for key, value in arguments.items())})"


def _shown(key: str, value: Any) -> str:
    if value is not None and (key in _WITHHELD or (isinstance(value, str) and _SECRET.search(key))):
        return "'...'"
    if isinstance(value, Enum):
        return f"{type(value).__name__}.{value.name}"
    names = getattr(value, "model_fields_set", None)  # those that an object of the library's was made with
    names = getattr(value, "__dataclass_fields__", None) if names is None else sorted(names)
    if names is None:
        return repr(value)
    return as_python(type(value).__name__, {name: getattr(value, name) for name in names})
