"""The backend `tensorrt`: opens an engine and a session for each GPU that has instances."""

from collections.abc import Iterator, Sequence

from tritonclient.grpc.model_config_pb2 import ModelConfig

from serving.backend import ModelFile
from serving.backends.arrays.backend import ArrayBackend
from serving.backends.arrays.session import ArraySession, Signature
from serving.backends.tensorrt.engine import PlanEngine, import_modules
from serving.backends.tensorrt.requirements import (
    DEFAULT_FILENAME,
    InstalledGpu,
    check_requirements,
    list_gpus,
    plan_path,
)
from serving.backends.tensorrt.session import PlanSession
from serving.findings import Finding
from serving.host_policy import HostPolicy
from serving.instance import Placement
from serving.spec import ModelSource
from sluice.errors import ErrorCode, SluiceError
from sluice.gpus import num_gpus


class TensorRtBackend(ArrayBackend):
    """Loads TensorRT plans. A plan is deserialized once for each GPU, and runs nowhere else."""

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
        return len(list_gpus())

    def read_signature(self, source: ModelSource) -> Signature:
        """Return the signature of the plan for the first GPU."""
        return _open_engine(source, 0).signature

    def open_session(
        self, source: ModelSource, placements: Sequence[Placement], policy: HostPolicy | None
    ) -> ArraySession:
        return PlanSession(_open_engine(source, placements[0].gpu), source.config, placements)

    def machine_findings(self, config: ModelConfig) -> Iterator[Finding]:
        if num_gpus() == 0:
            yield Finding("a TensorRT plan needs an NVIDIA GPU, and this machine has none", "backend")


def _open_engine(source: ModelSource, gpu: int | None) -> PlanEngine:
    """Open the engine of a GPU.

    Raises SluiceError UNAVAILABLE where GPU, packages or file are missing, INVALID for an instance on the CPU.
    """
    gpus = list_gpus()
    check_requirements(source.config, gpus)
    if gpu is None:
        reason = (
            f"unable to load model '{source.name}': a TensorRT plan runs on GPUs, and an instance_group has another"
        )
        raise SluiceError(ErrorCode.INVALID, f"{reason} kind; write kind: KIND_GPU")
    if gpu >= len(gpus):
        raise SluiceError(ErrorCode.INVALID, _missing_gpu(source.name, gpu, gpus))
    return PlanEngine(plan_path(source, gpus[gpu]), source.name, import_modules(), gpu)


def _missing_gpu(model: str, gpu: int, gpus: list[InstalledGpu]) -> str:
    return f"unable to load model '{model}': an instance_group asks for GPU {gpu}, and there are {len(gpus)}, from 0"
