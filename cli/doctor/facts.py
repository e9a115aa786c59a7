"""Facts about a machine and a model, as values: `machine` and `models` gather them, the checks judge them."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from sluice.cli.gpus import ComputeCapability, NvidiaDriver
from sluice.engine.config import Runtime
from sluice.engine.model_folder import ModelFormat


@dataclass(frozen=True, slots=True)
class InstalledLibraries:
    """Versions of installed libraries, by the name of their distribution."""

    versions: Mapping[str, str]
    torch_cuda: tuple[int, int] | None = None
    """The CUDA that the installed torch was built for; None for a build without CUDA."""


@dataclass(frozen=True, slots=True)
class MachineFacts:
    """The host on which the server is to run."""

    python_version: str
    num_cores: int
    memory_available_bytes: int
    cpu_dtypes: tuple[str, ...]
    """Types that OpenVINO computes in natively, such as `BF16`; none where it cannot be imported."""
    cache_folder: Path
    disk_free_bytes: int
    """Free space on the disk of the cache folder."""
    driver: NvidiaDriver
    libraries: InstalledLibraries
    busy_ports: tuple[int, ...] = ()
    """Ports to serve at that another process already listens on."""
    environments: Mapping[Runtime, tuple[str, str]] = field(default_factory=dict)
    """The Python of each environment that `sluice runtime install` made, and the version of the runtime's library in
    it, "" where that is missing."""
    bundled_problem: str = ""
    """Why OpenVINO, the runtime that comes with Sluice, cannot be imported; "" where it can."""


@dataclass(frozen=True, slots=True)
class ModelSize:
    """The memory a whole model needs. GPUs that share its layers hold a part each."""

    weight_bytes: int
    kv_bytes_per_token: int | None
    """Bytes of keys and values in the model's own type; None where config.json does not give its shape."""
    max_model_len: int | None


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """A model, as its folder describes it."""

    name: str
    path: Path
    format: ModelFormat
    architecture: str
    dtype: str
    quantization: str
    size: ModelSize
    has_tokenizer: bool
    num_gpus: int = 1
    """Tensor times pipeline parallel size, as requested or as compiled."""
    built_by: str = ""
    """Version of TensorRT-LLM that compiled the engine."""
    built_for: ComputeCapability | None = None
    """Compute capability of the GPU that the engine was compiled on, where `sluice build` recorded it."""
    transformers_version: str = ""
    """Version of transformers that wrote config.json."""
    problems: Mapping[Runtime, str] = field(default_factory=dict)
    """Why a runtime that takes the model's format cannot load it."""
    manifest: Mapping[str, str] = field(default_factory=dict)
    """Fields of sluice-build.json."""
    tokenizer_sha256: str = ""
