"""onnxruntime's providers for where an instance runs."""

from tritonclient.grpc.model_config_pb2 import ModelConfig

from serving.backends.onnxruntime.accelerators import gpu_accelerators
from serving.backends.onnxruntime.session import Provider
from serving.instance import Placement
from sluice.errors import ErrorCode, SluiceError
from sluice.machine import num_gpus

_CPU, _CUDA, _OPENVINO = "CPUExecutionProvider", "CUDAExecutionProvider", "OpenVINOExecutionProvider"
_TENSORRT = "TensorrtExecutionProvider"


def num_usable_gpus() -> int:
    """GPUs that the installed onnxruntime can run on."""
    return num_gpus() if _has(_CUDA) else 0


def providers_of(placement: Placement, config: ModelConfig) -> list[Provider]:
    """onnxruntime's providers, best first. Raises SluiceError INVALID for an accelerator that there is not."""
    providers: list[Provider] = []
    if placement.gpu is not None:
        providers += _on_gpu(placement.gpu, config)
    for accelerator in config.optimization.execution_accelerators.cpu_execution_accelerator:
        if accelerator.name != "openvino" or not _has(_OPENVINO):
            reason = f"unknown Execution Accelerator '{accelerator.name}' is requested"
            raise SluiceError(ErrorCode.INVALID, reason)
        providers.append((_OPENVINO, {"device_type": "CPU"}))
    return [*providers, _CPU]


def _on_gpu(gpu: int, config: ModelConfig) -> list[Provider]:
    device = {"device_id": str(gpu)}
    accelerators = gpu_accelerators(config)
    cuda: Provider = (_CUDA, accelerators.get("cuda", {}) | device)
    if "tensorrt" not in accelerators:
        return [cuda]
    if not _has(_TENSORRT):
        raise SluiceError(ErrorCode.INVALID, "unknown Execution Accelerator 'tensorrt' is requested")
    return [(_TENSORRT, accelerators["tensorrt"] | device), cuda]


def _has(provider: str) -> bool:
    import onnxruntime

    return provider in onnxruntime.get_available_providers()
