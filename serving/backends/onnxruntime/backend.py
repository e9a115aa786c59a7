"""The backend `onnxruntime`: finds a model's file and opens sessions of it."""

import logging
from collections.abc import Iterator, Sequence
from copy import deepcopy
from pathlib import Path

from tritonclient.grpc.model_config_pb2 import ModelConfig

from sluice.errors import ErrorCode, SluiceError
from sluice.serving.backend import BackendContext, ModelFile
from sluice.serving.backends.arrays.backend import ArrayBackend
from sluice.serving.backends.arrays.session import Signature
from sluice.serving.backends.onnxruntime.options import (
    build_session_options,
    choose_providers,
    missing_accelerators,
    num_usable_gpus,
)
from sluice.serving.backends.onnxruntime.session import OnnxSession
from sluice.serving.findings import Finding
from sluice.serving.instance import HostPolicy, Placement, place_instances
from sluice.serving.spec import ModelSource

log = logging.getLogger(__name__)
_PLATFORM = "onnxruntime_onnx"
_UNOPTIMIZED = 2


class OnnxRuntimeBackend(ArrayBackend):
    """Loads ONNX models: a file, or a folder with a file and its external data."""

    name = "onnxruntime"
    is_stateless = True
    uses_gpus = True
    model_files: tuple[ModelFile, ...] = (ModelFile("model.onnx", _PLATFORM),)
    detection_order = 10
    supported_fields = ArrayBackend.supported_fields | {
        "instance_group.gpus",
        "model_operations",
        "optimization.execution_accelerators.cpu_execution_accelerator",
        "optimization.execution_accelerators.gpu_execution_accelerator",
        "optimization.graph",
    }
    default_model_filename = "model.onnx"
    optimizes_sizes = True

    def start_loading_early(self) -> None:
        import onnxruntime  # noqa: F401

    async def complete(self, source: ModelSource, context: BackendContext) -> ModelConfig:
        config = await super().complete(source, context)
        config.platform = config.platform or _PLATFORM
        return config

    def check_options(self, config: ModelConfig) -> None:
        for each in place_instances(config, self.num_gpus()):
            choose_providers(each, config)
        plain = deepcopy(config)
        plain.ClearField("model_operations")  # libraries that only a load opens
        build_session_options(plain)

    def can_open(self, config: ModelConfig) -> bool:
        return not config.model_operations.op_library_filename

    def num_gpus(self) -> int:
        return num_usable_gpus()

    def machine_findings(self, config: ModelConfig) -> Iterator[Finding]:
        return missing_accelerators(config)

    def read_signature(self, source: ModelSource) -> Signature:
        config = deepcopy(source.config)
        config.optimization.graph.level = _UNOPTIMIZED
        return OnnxSession(model_path(source), config, choose_providers(Placement(config.name), config)).signature

    def open_session(
        self, source: ModelSource, placements: Sequence[Placement], policy: HostPolicy | None
    ) -> OnnxSession:
        num_threads = len(policy.cores) if policy is not None else 0
        for each in missing_accelerators(source.config):
            log.warning("model '%s': %s", source.name, each.message)
        return OnnxSession(
            model_path(source), source.config, choose_providers(placements[0], source.config), num_threads
        )


def model_path(source: ModelSource) -> Path:
    """Return the file to open; in a folder, its model.onnx. Raises UNAVAILABLE where there is none."""
    path = source.model_file if source.config.default_model_filename else source.version_folder / "model.onnx"
    if path.is_dir():
        path = path / "model.onnx"
    if not path.exists():
        raise SluiceError(ErrorCode.UNAVAILABLE, f"unable to find '{path}' for model instance '{source.name}'")
    return path
