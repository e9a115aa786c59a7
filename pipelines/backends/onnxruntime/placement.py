"""onnxruntime's providers for where an instance runs."""

from tritonclient.grpc.model_config_pb2 import ModelConfig

from engine.errors import ErrorCode, SluiceError
from pipelines.backends.devices import num_gpus
from pipelines.backends.onnxruntime.session import Provider
from pipelines.backends.placement import Placement

_CPU, _CUDA, _OPENVINO = "CPUExecutionProvider", "CUDAExecutionProvider", "OpenVINOExecutionProvider"


def num_usable_gpus() -> int:
    """GPUs that the installed onnxruntime can run on."""
    return num_gpus() if _has(_CUDA) else 0


def providers_of(placement: Placement, config: ModelConfig) -> list[Provider]:
    """onnxruntime's providers, best first. Raises SluiceError INVALID for an accelerator that there is not."""
    providers: list[Provider] = []
    if placement.gpu is not None:
        providers.append((_CUDA, {"device_id": str(placement.gpu)}))
    for accelerator in config.optimization.execution_accelerators.cpu_execution_accelerator:
        if accelerator.name != "openvino" or not _has(_OPENVINO):
            reason = f"unknown Execution Accelerator '{accelerator.name}' is requested"
            raise SluiceError(ErrorCode.INVALID, reason)
        providers.append((_OPENVINO, {"device_type": "CPU"}))
    return [*providers, _CPU]


def _has(provider: str) -> bool:
    import onnxruntime

    return provider in onnxruntime.get_available_providers()
