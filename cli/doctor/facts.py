"""What a machine has, as values: gathered elsewhere, judged elsewhere."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from engine.model_folder import ModelFormat


class Capability(NamedTuple):
    """A GPU's compute capability."""

    major: int
    minor: int

    def __str__(self) -> str:
        return f"{self.major}.{self.minor}"


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU as NVML tells of it."""

    index: int
    name: str
    capability: Capability | None
    memory_total_bytes: int
    memory_free_bytes: int
    num_processes: int = 0
    """That hold memory of it now."""
    is_partitioned: bool = False
    """Whether MIG is on: then its slices are what CUDA shows."""


@dataclass(frozen=True, slots=True)
class Gpus:
    """All of them, and the driver. `reason` says why there are none."""

    driver_version: str = ""
    cuda_version: tuple[int, int] | None = None
    """The newest that the driver runs."""
    gpus: tuple[Gpu, ...] = ()
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Libraries:
    """What is installed, by distribution."""

    versions: Mapping[str, str]
    torch_cuda: tuple[int, int] | None = None
    """The CUDA that the installed torch was built for; None for a build without."""


@dataclass(frozen=True, slots=True)
class Machine:
    """The host."""

    python_version: str
    num_cores: int
    memory_available_bytes: int
    cpu_dtypes: tuple[str, ...]
    """That OpenVINO computes in natively, as `BF16`."""
    cache_folder: Path
    disk_free_bytes: int
    """Where the cache folder is."""
    gpus: Gpus
    libraries: Libraries
    busy_ports: tuple[int, ...] = ()
    """Of the ports to serve at: those that something listens on already."""


@dataclass(frozen=True, slots=True)
class ModelSize:
    """What a model takes. All of it together: the GPUs that share the layers have their part each."""

    weight_bytes: int
    kv_bytes_per_token: int | None
    """In the type of the computation; None where config.json does not tell."""
    max_model_len: int | None


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """A model's folder."""

    name: str
    path: Path
    format: ModelFormat
    architecture: str
    dtype: str
    quantization: str
    size: ModelSize
    has_tokenizer: bool
    num_gpus: int = 1
    """Tensor times pipeline parallel, as asked or as compiled."""
    built_by: str = ""
    """Version of TensorRT-LLM that compiled the engine."""
    built_for: Capability | None = None
    """The GPU that it was compiled on, where `sluice build` noted it."""
    transformers_version: str = ""
    """That wrote config.json."""
    openvino_problem: str = ""
    """Why OpenVINO could not run it; "" where it can."""
    notes: Mapping[str, str] = field(default_factory=dict)
    """Of sluice-build.json."""
    tokenizer_sha256: str = ""
