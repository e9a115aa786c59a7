"""Loads ONNX models."""

from collections.abc import Sequence

from tritonclient.grpc.model_config_pb2 import ModelConfig

from serving.backend import BackendContext, ModelFile
from serving.backends.arrays.backend import ArrayBackend
from serving.backends.arrays.signature import Signature
from serving.backends.onnxruntime.placement import num_usable_gpus, providers_of
from serving.backends.onnxruntime.session import OnnxSession, model_path
from serving.instance import HostPolicy, Placement
from serving.spec import ModelSource

PLATFORM = "onnxruntime_onnx"
_UNOPTIMIZED = 2


class OnnxRuntimeBackend(ArrayBackend):
    """A model is a file, or a folder with a file and its external data."""

    name = "onnxruntime"
    model_files: tuple[ModelFile, ...] = (ModelFile("model.onnx", "onnxruntime_onnx"),)
    detection_order = 10
    supported_fields = ArrayBackend.supported_fields | {
        "instance_group.gpus",
        "model_operations",
        "optimization.execution_accelerators.cpu_execution_accelerator",
        "optimization.execution_accelerators.gpu_execution_accelerator",
        "optimization.graph",
    }
    default_model_filename = "model.onnx"

    def start_loading_early(self) -> None:
        import onnxruntime  # noqa: F401

    async def complete(self, source: ModelSource, context: BackendContext) -> ModelConfig:
        config = await super().complete(source, context)
        config.platform = config.platform or PLATFORM
        return config

    def num_gpus(self) -> int:
        return num_usable_gpus()

    def read_signature(self, source: ModelSource) -> Signature:
        config = ModelConfig()
        config.CopyFrom(source.config)
        config.optimization.graph.level = _UNOPTIMIZED
        return OnnxSession(model_path(source), config, providers_of(Placement(config.name), config)).signature

    def open_session(
        self, source: ModelSource, placements: Sequence[Placement], policy: HostPolicy | None
    ) -> OnnxSession:
        num_threads = len(policy.cores) if policy is not None else 0
        return OnnxSession(model_path(source), source.config, providers_of(placements[0], source.config), num_threads)
