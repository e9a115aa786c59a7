"""Where a model's instances run."""

import logging
from dataclasses import dataclass

from tritonclient.grpc.model_config_pb2 import ModelConfig, ModelInstanceGroup

from engine.errors import ErrorCode, SluiceError
from pipelines.backends.onnxruntime.session import Provider

_log = logging.getLogger(__name__)

_CPU, _CUDA, _OPENVINO = "CPUExecutionProvider", "CUDAExecutionProvider", "OpenVINOExecutionProvider"


@dataclass(frozen=True, slots=True)
class Placement:
    """An instance's name, and the GPU that it runs on; None is the CPU."""

    name: str
    gpu: int | None = None


def placements_of(config: ModelConfig) -> list[Placement]:
    """One for each instance that the groups ask for; a single one on the CPU where there are no groups."""
    placements: list[Placement] = []
    for group in config.instance_group or [ModelInstanceGroup(name=config.name, count=1)]:
        gpus = _gpus_of(group, config.name)
        for gpu in gpus:
            for _ in range(max(group.count, 1)):
                placements.append(Placement(f"{group.name or config.name}_{len(placements)}", gpu))
    return placements


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


def _gpus_of(group: ModelInstanceGroup, model: str) -> list[int | None]:
    is_asked_for = group.kind == ModelInstanceGroup.KIND_GPU
    if _has(_CUDA) and (is_asked_for or group.kind == ModelInstanceGroup.KIND_AUTO):
        return list(group.gpus) or [0]
    if is_asked_for:
        _log.warning(
            "model %s: onnxruntime has no GPU provider here; instance group %s runs on the CPU", model, group.name
        )
    return [None]


def _has(provider: str) -> bool:
    import onnxruntime

    return provider in onnxruntime.get_available_providers()
