"""The backend `tensorrt`: chooses each GPU's plan by compute capability (`cc_model_filenames`) and opens it."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import pynvml
from tritonclient.grpc.model_config_pb2 import ModelConfig, ModelInstanceGroup

from sluice.errors import ErrorCode, SluiceError, invalid, invalid_argument
from sluice.serving.backend import ModelFile
from sluice.serving.backends.arrays.backend import ArrayBackend
from sluice.serving.backends.arrays.session import ArraySession, Signature
from sluice.serving.backends.tensorrt.engine import PlanEngine, import_modules
from sluice.serving.backends.tensorrt.session import PlanSession
from sluice.serving.findings import Finding
from sluice.serving.instance import HostPolicy, Placement
from sluice.serving.spec import ModelSource

Capability = tuple[int, int]
"""Major and minor compute capability."""
DEFAULT_FILENAME = "model.plan"
_PACKAGES = {"tensorrt": "tensorrt", "cuda.bindings": "cuda-python"}
"""Packages to install, by module."""


@dataclass(frozen=True, slots=True)
class InstalledGpu:
    name: str
    capability: Capability


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

    def check_options(self, config: ModelConfig) -> None:
        on_cpu = any(group.kind == ModelInstanceGroup.KIND_CPU for group in config.instance_group)
        if on_cpu and list_gpus():  # without a GPU every group without a kind is on the CPU
            raise _needs_gpu_kind(config.name)

    def machine_findings(self, config: ModelConfig) -> Iterator[Finding]:
        try:
            check_requirements(config, list_gpus())
        except SluiceError as error:
            yield Finding(error.message, "backend")


def _open_engine(source: ModelSource, gpu: int | None) -> PlanEngine:
    """Open a GPU's engine. Raises UNAVAILABLE without GPU, packages or file, INVALID for an instance on the CPU."""
    gpus = list_gpus()
    check_requirements(source.config, gpus)
    if gpu is None:
        raise _needs_gpu_kind(source.name)
    if gpu >= len(gpus):
        raise invalid_argument(
            f"unable to load model '{source.name}': an instance_group asks for GPU {gpu}, and there are {len(gpus)}, "
            "from 0"
        )
    return PlanEngine(plan_path(source, gpus[gpu]), source.name, import_modules(), gpu)


def _needs_gpu_kind(model: str) -> SluiceError:
    reason = f"unable to load model '{model}': a TensorRT plan runs on GPUs, and an instance_group has another"
    return invalid("instance_group", f"{reason} kind; write kind: KIND_GPU")


def list_gpus() -> list[InstalledGpu]:
    """Return the GPUs in the driver's order (CUDA's with CUDA_DEVICE_ORDER=PCI_BUS_ID). Call it on a thread."""
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return []
    try:
        return [_describe_gpu(pynvml.nvmlDeviceGetHandleByIndex(index)) for index in range(pynvml.nvmlDeviceGetCount())]
    finally:
        pynvml.nvmlShutdown()


def _describe_gpu(handle: object) -> InstalledGpu:
    major, minor = pynvml.nvmlDeviceGetCudaComputeCapability(handle)
    return InstalledGpu(str(pynvml.nvmlDeviceGetName(handle)), (major, minor))


def check_requirements(config: ModelConfig, gpus: list[InstalledGpu]) -> None:
    """Raise UNAVAILABLE without GPU or packages: what was found, what is missing, which GPU takes which plan."""
    missing = [package for module, package in _PACKAGES.items() if not _is_installed(module)]
    if gpus and not missing:
        return
    lacks = [f"the Python package '{package}' is not installed" for package in missing]
    raise SluiceError(
        ErrorCode.UNAVAILABLE,
        f"unable to load model '{config.name}': a TensorRT plan needs an NVIDIA GPU and the Python packages "
        f"{' and '.join(_PACKAGES.values())}; {'; '.join([_describe_gpus(config, gpus), *lacks])}",
    )


def _is_installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def _describe_gpus(config: ModelConfig, gpus: list[InstalledGpu]) -> str:
    if not gpus:
        return f"there is no GPU (plans: {format_plans(config)})"
    return ", ".join(
        f"GPU {index} is {gpu.name} with compute capability {format_capability(gpu.capability)} and takes "
        f"{plan_filename(config, gpu.capability)}"
        for index, gpu in enumerate(gpus)
    )


def plan_path(source: ModelSource, gpu: InstalledGpu) -> Path:
    """Return the plan for `gpu`. Raises UNAVAILABLE where the file is missing."""
    path = source.version_folder / plan_filename(source.config, gpu.capability)
    if not path.is_file():
        raise SluiceError(
            ErrorCode.UNAVAILABLE,
            f"unable to find '{path}' for model instance '{source.name}', which {gpu.name} with compute capability "
            f"{format_capability(gpu.capability)} takes ({format_plans(source.config)})",
        )
    return path


def plan_filename(config: ModelConfig, capability: Capability) -> str:
    """Return the file name of the plan for a compute capability. A key may be 7.5 or, as some write it, 75."""
    by_capability = {parse_capability(key): name for key, name in config.cc_model_filenames.items()}
    return by_capability.get(capability) or _default_filename(config)


def format_plans(config: ModelConfig) -> str:
    """Describe which compute capability takes which file, for errors."""
    known = {parse_capability(key): name for key, name in config.cc_model_filenames.items()}
    parts = [f"compute capability {format_capability(each)}: {known[each]}" for each in sorted(filter(None, known))]
    return ", ".join(
        [*parts, f"any other: {_default_filename(config)}" if parts else f"any: {_default_filename(config)}"]
    )


def parse_capability(key: str) -> Capability | None:
    """Parse a compute capability: 7.5 and 75 are the same, and 120 is 12.0. Return None for anything else."""
    major, dot, minor = key.partition(".")
    if not dot:
        major, minor = key[:-1], key[-1:]
    return (int(major), int(minor)) if major.isdecimal() and minor.isdecimal() else None


def format_capability(capability: Capability) -> str:
    """Format a compute capability as config.pbtxt does: 8.6."""
    return f"{capability[0]}.{capability[1]}"


def _default_filename(config: ModelConfig) -> str:
    return config.default_model_filename or DEFAULT_FILENAME
