"""Loads TensorRT plans."""

from collections.abc import Iterator, Sequence

from tritonclient.grpc.model_config_pb2 import ModelConfig

from serving.backend import ModelFile
from serving.backends.arrays.backend import ArrayBackend
from serving.backends.arrays.session import ArraySession
from serving.backends.arrays.signature import Signature
from serving.backends.tensorrt.engine import Engine
from serving.backends.tensorrt.gpus import Gpu, installed_gpus
from serving.backends.tensorrt.libraries import check_requirements, import_libraries
from serving.backends.tensorrt.plan_files import DEFAULT_FILENAME, plan_path
from serving.backends.tensorrt.session import PlanSession
from serving.findings import Finding
from serving.host_policy import HostPolicy
from serving.instance import Placement
from serving.spec import ModelSource
from sluice.errors import ErrorCode, SluiceError
from sluice.machine import num_gpus


class TensorRtBackend(ArrayBackend):
    """A plan is deserialized once for each GPU, and runs nowhere else."""

    name = "tensorrt"
    model_files: tuple[ModelFile, ...] = (ModelFile(DEFAULT_FILENAME, "tensorrt_plan"),)
    detection_order = 20
    supported_fields = ArrayBackend.supported_fields | {
        "cc_model_filenames",
        "instance_group.gpus",
        "instance_group.profile",
    }
    default_model_filename = DEFAULT_FILENAME

    def num_gpus(self) -> int:
        return len(installed_gpus())

    def read_signature(self, source: ModelSource) -> Signature:
        """Of the first GPU's plan."""
        return _open(source, 0).signature

    def open_session(
        self, source: ModelSource, placements: Sequence[Placement], policy: HostPolicy | None
    ) -> ArraySession:
        return PlanSession(_open(source, placements[0].gpu), source.config, placements)

    def machine_findings(self, config: ModelConfig) -> Iterator[Finding]:
        if num_gpus() == 0:
            yield Finding("a TensorRT plan needs an NVIDIA GPU, and this machine has none", "backend")


def _open(source: ModelSource, gpu: int | None) -> Engine:
    """Raises SluiceError UNAVAILABLE where GPU, packages or file are missing, INVALID for an instance on the CPU."""
    gpus = installed_gpus()
    check_requirements(source.config, gpus)
    if gpu is None:
        reason = (
            f"unable to load model '{source.name}': a TensorRT plan runs on GPUs, and an instance_group has another"
        )
        raise SluiceError(ErrorCode.INVALID, f"{reason} kind; write kind: KIND_GPU")
    if gpu >= len(gpus):
        raise SluiceError(ErrorCode.INVALID, _missing_gpu(source.name, gpu, gpus))
    return Engine(plan_path(source, gpus[gpu]), source.name, import_libraries(), gpu)


def _missing_gpu(model: str, gpu: int, gpus: list[Gpu]) -> str:
    return f"unable to load model '{model}': an instance_group asks for GPU {gpu}, and there are {len(gpus)}, from 0"
