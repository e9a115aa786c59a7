"""onnxruntime's options as config.pbtxt gives them, in the names of Triton's backend."""

from typing import TYPE_CHECKING

from tritonclient.grpc.model_config_pb2 import ModelConfig

from serving.backends.onnxruntime.processor import overflows_int8
from sluice.errors import ErrorCode, SluiceError

if TYPE_CHECKING:
    from onnxruntime import RunOptions, SessionOptions

_FATAL_ONLY = 4
"""Of onnxruntime's log: what else goes wrong is the error of a load or of a request."""
_ARENA_SHRINKAGE = "memory.enable_memory_arena_shrinkage"
_SPINNING = "session.intra_op.allow_spinning"
_INT8_PRECISION = "session.x64quantprecision"


def session_options(config: ModelConfig, num_threads: int = 0) -> "SessionOptions":
    """`num_threads` within an operator, where the configuration says nothing; 0 is onnxruntime's own choice.

    Raises SluiceError INVALID for values that there are not.
    """
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = _FATAL_ONLY
    options.graph_optimization_level = _optimization_level(config.optimization.graph.level)
    if _integer(config, "execution_mode", highest=1):
        options.execution_mode = onnxruntime.ExecutionMode.ORT_PARALLEL
    options.intra_op_num_threads = _integer(config, "intra_op_thread_count") or num_threads
    options.inter_op_num_threads = _integer(config, "inter_op_thread_count")
    options.enable_cpu_mem_arena = _switch(config, "enable_mem_arena", default=True)
    options.enable_mem_pattern = _switch(config, "enable_mem_pattern", default=True)
    # Threads that spin while they wait would take the processor from the server that feeds them.
    options.add_session_config_entry(_SPINNING, "0")
    for key, parameter in config.parameters.items():
        if key.startswith("session."):
            options.add_session_config_entry(key, _session_entry(key, parameter.string_value))
    for library in config.model_operations.op_library_filename:
        options.register_custom_ops_library(library)
    return options


def _session_entry(key: str, value: str) -> str:
    """`auto` for 8-bit precision is what this processor needs; everything else is onnxruntime's to read."""
    if key == _INT8_PRECISION and value == "auto":
        return "1" if overflows_int8() else "0"
    return value


def run_entries(config: ModelConfig) -> dict[str, str]:
    """What goes into `RunOptions` of every run. Asked once: the protobuf is slow to answer."""
    if _ARENA_SHRINKAGE not in config.parameters:
        return {}
    return {_ARENA_SHRINKAGE: config.parameters[_ARENA_SHRINKAGE].string_value}


def run_options(entries: dict[str, str]) -> "RunOptions":
    """Of one run."""
    import onnxruntime

    options = onnxruntime.RunOptions()
    options.log_severity_level = _FATAL_ONLY
    for key, value in entries.items():
        options.add_run_config_entry(key, value)
    return options


def _optimization_level(level: int) -> object:
    """Triton's numbers, which are not onnxruntime's: 0, the default, is everything."""
    from onnxruntime import GraphOptimizationLevel

    levels = {
        -1: GraphOptimizationLevel.ORT_ENABLE_BASIC,
        1: GraphOptimizationLevel.ORT_ENABLE_EXTENDED,
        2: GraphOptimizationLevel.ORT_DISABLE_ALL,
    }
    return levels.get(level, GraphOptimizationLevel.ORT_ENABLE_ALL)


def _integer(config: ModelConfig, key: str, highest: int | None = None) -> int:
    """0, onnxruntime's own choice, where it is not given."""
    if key not in config.parameters:
        return 0
    text = config.parameters[key].string_value
    try:
        value = int(text)
    except ValueError:
        raise _wrong(config, key, text, "an integer") from None
    if value < 0 or (highest is not None and value > highest):
        raise _wrong(config, key, text, "0 or more" if highest is None else f"0 to {highest}")
    return value


def _switch(config: ModelConfig, key: str, *, default: bool) -> bool:
    if key not in config.parameters:
        return default
    text = config.parameters[key].string_value
    if text.lower() not in ("0", "1", "true", "false"):
        raise _wrong(config, key, text, "0 or 1")
    return text.lower() in ("1", "true")


def _wrong(config: ModelConfig, key: str, text: str, expected: str) -> SluiceError:
    message = f"unable to load model '{config.name}', parameter '{key}' is '{text}', expected {expected}"
    return SluiceError(ErrorCode.INVALID, message)
