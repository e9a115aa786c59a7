"""What plans need and Sluice does not bring along: a GPU, TensorRT, and CUDA's runtime for Python."""

from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

from tritonclient.grpc.model_config_pb2 import ModelConfig

from serving.backends.tensorrt.gpus import Gpu, capability_text
from serving.backends.tensorrt.plan_files import plan_filename, plans_text
from sluice.errors import ErrorCode, SluiceError

_PACKAGES = {"tensorrt": "tensorrt", "cuda.bindings": "cuda-python"}
"""Modules, and how their packages are called where they are installed from."""


@dataclass(frozen=True, slots=True)
class Libraries:
    """The modules `tensorrt` and `cuda.bindings.runtime`."""

    tensorrt: Any
    cuda: Any


def check_requirements(config: ModelConfig, gpus: list[Gpu]) -> None:
    """Raises SluiceError UNAVAILABLE that says what was found, what is missing, and which GPU takes which plan."""
    missing = [package for module, package in _PACKAGES.items() if not _is_installed(module)]
    if gpus and not missing:
        return
    lacks = [f"the Python package '{package}' is not installed" for package in missing]
    raise SluiceError(
        ErrorCode.UNAVAILABLE,
        f"unable to load model '{config.name}': a TensorRT plan needs an NVIDIA GPU and the Python packages "
        f"{' and '.join(_PACKAGES.values())}; {'; '.join([_found(config, gpus), *lacks])}",
    )


def import_libraries() -> Libraries:
    """Takes seconds: for a thread. Raises SluiceError UNAVAILABLE where one is broken."""
    try:
        import tensorrt
        from cuda.bindings import runtime
    except ImportError as error:
        raise SluiceError(ErrorCode.UNAVAILABLE, f"TensorRT cannot be imported: {error}") from error
    return Libraries(tensorrt, runtime)


def _is_installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def _found(config: ModelConfig, gpus: list[Gpu]) -> str:
    if not gpus:
        return f"there is no GPU (plans: {plans_text(config)})"
    return ", ".join(
        f"GPU {index} is {gpu.name} with compute capability {capability_text(gpu.capability)} and takes "
        f"{plan_filename(config, gpu.capability)}"
        for index, gpu in enumerate(gpus)
    )
