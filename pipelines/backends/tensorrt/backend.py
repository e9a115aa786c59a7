"""Loads TensorRT plans."""

from collections.abc import Sequence

from engine.errors import ErrorCode, SluiceError
from pipelines.backends.arrays.backend import ArrayBackend
from pipelines.backends.arrays.session import ArraySession
from pipelines.backends.arrays.signature import Signature
from pipelines.backends.base import ModelSource
from pipelines.backends.host_policy import HostPolicy
from pipelines.backends.placement import Placement
from pipelines.backends.tensorrt.engine import Engine
from pipelines.backends.tensorrt.gpus import Gpu, installed_gpus
from pipelines.backends.tensorrt.libraries import check_requirements, import_libraries
from pipelines.backends.tensorrt.plan_files import DEFAULT_FILENAME, plan_path
from pipelines.backends.tensorrt.session import PlanSession


class TensorRtBackend(ArrayBackend):
    """A plan is deserialized once for each GPU, and runs nowhere else."""

    name = "tensorrt"
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
