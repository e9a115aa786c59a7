"""`gpu_execution_accelerator` as options of onnxruntime's providers, in the names of Triton's backend."""

from collections.abc import Mapping

from tritonclient.grpc.model_config_pb2 import ModelConfig

from sluice.errors import ErrorCode, SluiceError

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


def gpu_accelerators(config: ModelConfig) -> dict[str, dict[str, str]]:
    """Options by accelerator: `tensorrt`, `cuda`. Raises SluiceError INVALID for others and for wrong values."""
    found: dict[str, dict[str, str]] = {}
    for accelerator in config.optimization.execution_accelerators.gpu_execution_accelerator:
        if accelerator.name == "tensorrt":
            found["tensorrt"] = _tensorrt_options(accelerator.parameters)
        elif accelerator.name == "cuda":
            found["cuda"] = dict(accelerator.parameters)
        else:
            raise _invalid(f"unknown Execution Accelerator '{accelerator.name}' is requested")
    return found


def _tensorrt_options(parameters: Mapping[str, str]) -> dict[str, str]:
    options: dict[str, str] = {}
    for key, value in parameters.items():
        if key == "precision_mode":
            if value not in _PRECISIONS:
                raise _invalid(f"unsupported precision mode '{value}' is requested")
            options |= _PRECISIONS[value]
        elif key in _TENSORRT_KEYS or key.startswith("trt_"):
            options[_TENSORRT_KEYS.get(key, key)] = value
        else:
            raise _invalid(f"unknown parameter '{key}' is provided for TensorRT Execution Accelerator")
    return options


def _invalid(message: str) -> SluiceError:
    return SluiceError(ErrorCode.INVALID, message)
