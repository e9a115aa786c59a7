"""The interface of a backend: code that serves one kind of model.

Backends are found by entry point: group `sluice.backends`, the name as `backend` in config.pbtxt has it, the object a
`Backend` class that takes no arguments. Sluice's own register the same way, in pyproject.toml.

A backend declares what a repository must know of it before it loads anything: the files and platforms that tell its
models, which fields of config.pbtxt it supports beyond the common ones, and what `sluice repository check` should say.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import ClassVar, Protocol

from tritonclient.grpc.model_config_pb2 import ModelConfig

from serving.batching.rate_limiter import RateLimiter
from serving.caching.response_cache import ResponseCache
from serving.findings import Finding
from serving.instance import HostPolicy
from serving.latencies import LatencyOptions
from serving.model import Model
from serving.spec import ModelSource


class CustomMetricKind(StrEnum):
    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


class CustomMetric(Protocol):
    """One labelled series. Event loop's thread only."""

    def increment(self, value: float) -> None:
        """Raises SluiceError INVALID below 0 for a counter, UNIMPLEMENTED for a histogram."""

    def set(self, value: float) -> None:
        """Raises SluiceError UNIMPLEMENTED for what is no gauge."""

    def observe(self, value: float) -> None:
        """Raises SluiceError UNIMPLEMENTED for what is no histogram."""

    def value(self) -> float:
        """Raises SluiceError UNIMPLEMENTED for a histogram."""

    def release(self) -> None:
        """Its model holds it no more. The series stays, as in Triton: it may be made again, and go on. Idempotent."""


class CustomMetricFamily(Protocol):
    """A name with its series. Event loop's thread only."""

    def metric(self, labels: Mapping[str, str], buckets: Sequence[float] | None = None) -> CustomMetric:
        """The series of those labels, the same for equal ones. Raises SluiceError INVALID for buckets that are none."""

    def release(self) -> None:
        """Its model has deleted it: the family goes, with its series, when all who made it have. Idempotent."""


class CustomMetrics(Protocol):
    """All of a server."""

    def family(self, name: str, description: str, kind: CustomMetricKind) -> CustomMetricFamily:
        """The family of that name. Raises SluiceError ALREADY_EXISTS where it is there with another kind."""


class ModelLookup(Protocol):
    """The loaded models, for backends that call others."""

    def find(self, name: str, version: int = -1) -> Model:
        """Return the version of that name, the highest ready one for -1. Raises NOT_FOUND or UNAVAILABLE."""
        ...


@dataclass(frozen=True, slots=True)
class LoadOverrides:
    """What a load request brings along: a whole configuration as JSON, and files by path inside the model's folder.

    With files, the model is what they and the configuration say, and its folder is not read.
    """

    config_json: str | None = None
    files: tuple[tuple[str, bytes], ...] = ()


class ModelControl(Protocol):
    """The repository, for models that load and unload others."""

    async def load(self, name: str, overrides: LoadOverrides | None = None) -> None:
        """Raises SluiceError in Triton's words, UNAVAILABLE in other control modes than explicit."""

    async def unload(self, name: str, unload_dependents: bool = False) -> None:
        """Raises as `load`; not for a name that there is not."""


@dataclass(frozen=True, slots=True)
class BackendContext:
    """What the server gives every backend. A backend that needs more gets it where it is registered."""

    models: ModelLookup
    backend_options: dict[str, dict[str, str]] = field(default_factory=dict)
    """`--backend-config=NAME,KEY=VALUE`, by backend and key."""
    control: ModelControl | None = None
    custom_metrics: CustomMetrics | None = None
    """Where models put metrics of their own; None where nobody reads them."""
    rate_limiter: RateLimiter | None = None
    """Limits what instances take together; None: nothing does."""
    response_cache: ResponseCache | None = None
    """Where responses are kept (`--cache-config`); None: each model in a memory of its own."""
    host_policies: dict[str, HostPolicy] = field(default_factory=dict)
    """`--host-policy`, by name."""
    latencies: LatencyOptions = field(default_factory=LatencyOptions)
    """What is measured of every model (`--metrics-config`)."""


@dataclass(frozen=True, slots=True)
class ModelFile:
    """A file name that tells a backend's models, and the `platform` of config.pbtxt that stands for it."""

    name: str
    platform: str = ""


@dataclass(frozen=True, slots=True)
class RuntimeReport:
    """What would run a model on this machine, without options of the command line."""

    runtime: str
    reason: str
    obeyed: tuple[str, ...]
    """The model's parameters that do something, or that what happens anyway agrees with."""
    unused: tuple[str, ...]
    """Notes on what has no effect as it is written."""


class Backend(ABC):
    """One kind of model. Methods run on the event loop and hand slow work to threads."""

    name: str
    """As config.pbtxt's `backend` has it."""
    default_model_filename: str = ""
    """What `default_model_filename` is completed to; "" where the kind has no model file."""
    model_files: tuple[ModelFile, ...] = ()
    """Files that tell a model of this kind where config.pbtxt names no backend; the first one is the usual."""
    detection_order: int = 50
    """Backends are asked in ascending order whether a folder is theirs, and by name where two are equal."""
    supported_fields: frozenset[str] = frozenset()
    """Fields of config.pbtxt that only some backends obey, and this one does (`serving/config/supported.py`)."""
    ignored_fields: ClassVar[Mapping[str, str]] = {}
    """Fields that backends commonly obey and this one does not, each with the reason."""

    def recognizes(self, version_folder: Path) -> bool:
        """Return whether the folder holds a model of this kind. Reads the file system: for a thread."""
        return any((version_folder / each.name).exists() for each in self.model_files)

    async def complete(self, source: ModelSource, context: BackendContext) -> ModelConfig:
        """Return the configuration with what the model file tells and config.pbtxt left out. By default as it is.

        Raises SluiceError INVALID where what was given contradicts the model.
        """
        return source.config

    @abstractmethod
    async def load(self, source: ModelSource, context: BackendContext) -> Model:
        """Load one version. Raises SluiceError with the reason that the repository's index will show."""

    def start_loading_early(self) -> None:  # noqa: B027 - a hook that most leave empty
        """Import what is slow to import; called on a thread when a repository names this backend."""

    def check(self, source: ModelSource) -> RuntimeReport | None:
        """Look at a model for `sluice repository check`, without loading it. Reads the file system: for a thread.

        Raises SluiceError with the reason that it would not load for. Returns what would run it, where that is chosen
        by the model and the machine.
        """
        return None

    def machine_findings(self, config: ModelConfig) -> Iterator[Finding]:
        """What this machine lacks to run the model: notes, since another machine may serve it."""
        return iter(())
