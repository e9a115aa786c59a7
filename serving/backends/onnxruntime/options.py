"""onnxruntime's options and execution providers from config.pbtxt, in the names of Triton's backend."""

from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from tritonclient.grpc.model_config_pb2 import ModelConfig

from sluice.errors import SluiceError, invalid_argument
from sluice.machine import num_gpus
from sluice.serving.findings import Finding, invalid_field
from sluice.serving.instance import Placement

if TYPE_CHECKING:
    from onnxruntime import RunOptions, SessionOptions

Provider = str | tuple[str, dict[str, str]]
_FATAL_ONLY = 4
"""Severity of onnxruntime's log. Other failures appear as the error of a load or of a request."""
_ARENA_SHRINKAGE = "memory.enable_memory_arena_shrinkage"
_SPINNING = "session.intra_op.allow_spinning"
_INT8_PRECISION = "session.x64quantprecision"
_VNNI = {"avx512_vnni", "avx_vnni"}
_CPU, _CUDA, _OPENVINO = "CPUExecutionProvider", "CUDAExecutionProvider", "OpenVINOExecutionProvider"
_TENSORRT = "TensorrtExecutionProvider"
_PRECISIONS: dict[str, dict[str, str]] = {
    "FP32": {},
    "FP16": {"trt_fp16_enable": "1"},
    "BF16": {"trt_bf16_enable": "1"},
    "INT8": {"trt_int8_enable": "1"},
}
_TENSORRT_KEYS = {
    "max_workspace_size_bytes": "trt_max_workspace_size",
    "int8_calibration_table_name": "trt_int8_calibration_table_name",
    "int8_use_native_calibration_table": "trt_int8_use_native_calibration_table",
}


def build_session_options(config: ModelConfig, num_threads: int = 0) -> "SessionOptions":
    """Build a session's options. `num_threads`: the default of intra-op threads, 0 is onnxruntime's. Raises INVALID."""
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
            options.add_session_config_entry(key, _resolve_session_entry(key, parameter.string_value))
    for library in config.model_operations.op_library_filename:
        options.register_custom_ops_library(library)
    return options


def read_run_entries(config: ModelConfig) -> dict[str, str]:
    """Return the entries for `RunOptions`. Read once for each model, because reading a protobuf is slow."""
    if _ARENA_SHRINKAGE not in config.parameters:
        return {}
    return {_ARENA_SHRINKAGE: config.parameters[_ARENA_SHRINKAGE].string_value}


def build_run_options(entries: dict[str, str]) -> "RunOptions":
    import onnxruntime

    options = onnxruntime.RunOptions()
    options.log_severity_level = _FATAL_ONLY
    for key, value in entries.items():
        options.add_run_config_entry(key, value)
    return options


def num_usable_gpus() -> int:
    """Return the number of GPUs that the installed onnxruntime can run on."""
    return num_gpus() if _is_available(_CUDA) else 0


def choose_providers(placement: Placement, config: ModelConfig) -> list[Provider]:
    """Return the execution providers of an instance, best first. Raises INVALID for an unknown accelerator."""
    providers: list[Provider] = []
    if placement.gpu is not None:
        providers += _gpu_providers(placement.gpu, config)
    for index, accelerator in enumerate(config.optimization.execution_accelerators.cpu_execution_accelerator):
        if accelerator.name != "openvino":
            raise _unknown_accelerator("cpu", index, accelerator.name, '"openvino"')
        if _is_available(_OPENVINO):
            providers.append((_OPENVINO, {"device_type": "CPU"}))
    return [*providers, _CPU]


def missing_accelerators(config: ModelConfig) -> Iterator[Finding]:
    """Yield a note on each accelerator that the installed onnxruntime lacks: it runs the model without."""
    accelerators = config.optimization.execution_accelerators
    for index, each in enumerate(accelerators.cpu_execution_accelerator):
        if each.name == "openvino" and not _is_available(_OPENVINO):
            yield Finding(
                "the installed onnxruntime has no accelerator 'openvino' and runs the model on the CPU without; "
                'backend: "openvino" runs it with OpenVINO',
                f"optimization.execution_accelerators.cpu_execution_accelerator[{index}].name",
            )
    for index, each in enumerate(accelerators.gpu_execution_accelerator if num_usable_gpus() else ()):
        if each.name == "tensorrt" and not _is_available(_TENSORRT):
            yield Finding(
                "the installed onnxruntime has no accelerator 'tensorrt' and runs the model with CUDA alone",
                f"optimization.execution_accelerators.gpu_execution_accelerator[{index}].name",
            )


def _unknown_accelerator(kind: str, index: int, name: str, known: str) -> SluiceError:
    return invalid_field(
        f"unknown Execution Accelerator '{name}' is requested",
        f"optimization.execution_accelerators.{kind}_execution_accelerator[{index}].name",
        f"{kind}_execution_accelerator [ {{ name: {known} }} ]",
    )


def parse_gpu_accelerators(config: ModelConfig) -> dict[str, dict[str, str]]:
    """Return the options of the GPU accelerators `tensorrt` and `cuda`. Raises INVALID for others and wrong values."""
    found: dict[str, dict[str, str]] = {}
    for index, accelerator in enumerate(config.optimization.execution_accelerators.gpu_execution_accelerator):
        if accelerator.name == "tensorrt":
            found["tensorrt"] = _tensorrt_options(accelerator.parameters)
        elif accelerator.name == "cuda":
            found["cuda"] = dict(accelerator.parameters)
        else:
            raise _unknown_accelerator("gpu", index, accelerator.name, '"tensorrt" or "cuda"')
    return found


@cache
def overflows_int8() -> bool:
    """Return whether products of signed 8-bit weights may overflow: x86 without VNNI adds them up in 16 bits.

    `session.x64quantprecision` then selects kernels that are exact, and about half as fast.
    """
    try:
        return lacks_vnni(Path("/proc/cpuinfo").read_text())
    except OSError:  # unknown: exact rather than fast
        return True


def lacks_vnni(cpuinfo: str) -> bool:
    """Return whether /proc/cpuinfo lists flags without VNNI. Other architectures list none and do not overflow."""
    flags = next((line.partition(":")[2].split() for line in cpuinfo.splitlines() if line.startswith("flags")), None)
    return flags is not None and not _VNNI.intersection(flags)


def _resolve_session_entry(key: str, value: str) -> str:
    """Resolve `auto` for the 8-bit precision to what this processor needs. Other values stay."""
    if key == _INT8_PRECISION and value == "auto":
        return "1" if overflows_int8() else "0"
    return value


def _optimization_level(level: int) -> object:
    """Convert Triton's level, whose numbers are not onnxruntime's: 0, the default, enables everything."""
    from onnxruntime import GraphOptimizationLevel

    levels = {
        -1: GraphOptimizationLevel.ORT_ENABLE_BASIC,
        1: GraphOptimizationLevel.ORT_ENABLE_EXTENDED,
        2: GraphOptimizationLevel.ORT_DISABLE_ALL,
    }
    return levels.get(level, GraphOptimizationLevel.ORT_ENABLE_ALL)


def _gpu_providers(gpu: int, config: ModelConfig) -> list[Provider]:
    device = {"device_id": str(gpu)}
    accelerators = parse_gpu_accelerators(config)
    cuda: Provider = (_CUDA, accelerators.get("cuda", {}) | device)
    if "tensorrt" not in accelerators or not _is_available(_TENSORRT):
        return [cuda]
    return [(_TENSORRT, accelerators["tensorrt"] | device), cuda]


def _tensorrt_options(parameters: Mapping[str, str]) -> dict[str, str]:
    options: dict[str, str] = {}
    for key, value in parameters.items():
        if key == "precision_mode":
            if value not in _PRECISIONS:
                raise invalid_argument(f"unsupported precision mode '{value}' is requested")
            options |= _PRECISIONS[value]
        elif key in _TENSORRT_KEYS or key.startswith("trt_"):
            options[_TENSORRT_KEYS.get(key, key)] = value
        else:
            raise invalid_argument(f"unknown parameter '{key}' is provided for TensorRT Execution Accelerator")
    return options


def _is_available(provider: str) -> bool:
    import onnxruntime

    return provider in onnxruntime.get_available_providers()


def _integer(config: ModelConfig, key: str, highest: int | None = None) -> int:
    """Return an integer parameter, 0 where it is absent: onnxruntime's own choice."""
    if key not in config.parameters:
        return 0
    text = config.parameters[key].string_value
    try:
        value = int(text)
    except ValueError:
        raise _invalid_value(config, key, text, "an integer") from None
    if value < 0 or (highest is not None and value > highest):
        raise _invalid_value(config, key, text, "0 or more" if highest is None else f"0 to {highest}")
    return value


def _switch(config: ModelConfig, key: str, *, default: bool) -> bool:
    if key not in config.parameters:
        return default
    text = config.parameters[key].string_value
    if text.lower() not in ("0", "1", "true", "false"):
        raise _invalid_value(config, key, text, "0 or 1")
    return text.lower() in ("1", "true")


def _invalid_value(config: ModelConfig, key: str, text: str, expected: str) -> SluiceError:
    return invalid_argument(f"unable to load model '{config.name}', parameter '{key}' is '{text}', expected {expected}")
