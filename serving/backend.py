"""The interface of a backend, which serves one kind of model.

Any package can bring a backend: it subclasses `Backend` and registers the class by entry point, in the group
`sluice.backends`, under the name that `backend` in config.pbtxt has. The class is called without arguments, once a
process. Sluice's own backends register the same way, in pyproject.toml; `tests/data/third_party_backend` is an example.

A backend declares what the repository must know before it loads a model: the files and platforms by which its models
are recognised, the fields of config.pbtxt that it supports, and the findings of `sluice repository check`. It completes
a configuration, and loads one version of a model as a `Model`. A model that runs batches is a `ScheduledModel`
(`serving/batching/scheduled_model.py`) over instances (`serving/instance.py`); one that waits for other parts of the
server is a `TaskModel` (`serving/task_model.py`).
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import ClassVar, Protocol

from tritonclient.grpc.model_config_pb2 import ModelConfig

from sluice.serving.batching.rate_limiter import RateLimiter
from sluice.serving.caching.response_cache import ResponseCache
from sluice.serving.findings import Finding
from sluice.serving.instance import HostPolicy
from sluice.serving.latencies import LatencyOptions
from sluice.serving.loop_turn import LoopTurn
from sluice.serving.model import Model
from sluice.serving.spec import ModelSource


@dataclass(frozen=True, slots=True)
class ModelFile:
    """A file name by which a backend's models are recognised, and the `platform` of config.pbtxt that it stands for."""

    name: str
    platform: str = ""


@dataclass(frozen=True, slots=True)
class RuntimeReport:
    """The runtime that this machine would choose for a model, without options of the command line."""

    runtime: str
    reason: str
    obeyed: tuple[str, ...]
    """The model's parameters that take effect, or that ask for what happens anyway."""
    unused: tuple[str, ...]
    """Notes on settings that have no effect as they are written."""


class Backend(ABC):
    """Serves one kind of model. Methods run on the event loop and hand slow work to threads."""

    name: str
    """The name that config.pbtxt's `backend` has."""
    default_model_filename: str = ""
    """Default of config.pbtxt's `default_model_filename`; "" for a kind of model that has no file."""
    model_files: tuple[ModelFile, ...] = ()
    """Files by which a model is recognised where config.pbtxt names no backend, the usual one first."""
    detection_order: int = 50
    """Backends try to recognise a folder in ascending order, and by name where two are equal."""
    supported_fields: frozenset[str] = frozenset()
    """Fields of config.pbtxt that only some backends support, this one too: `serving/config/supported_fields.py`."""
    is_stateless: bool = False
    """Whether several processes of a server may each load a model: it keeps nothing between requests."""
    uses_gpus: bool = False
    """Whether instances without a kind are on a GPU where the machine has one."""
    finds_models: bool = False
    """Whether its models find others by names that config.pbtxt does not have as steps."""
    ignored_fields: ClassVar[Mapping[str, str]] = {}
    """Fields that other backends support and this one ignores, by path, each with the reason."""

    def recognizes(self, version_folder: Path) -> bool:
        """Return whether the folder holds a model of this kind. Reads the file system: for a thread."""
        return any((version_folder / each.name).exists() for each in self.model_files)

    async def complete(self, source: ModelSource, context: "BackendContext") -> ModelConfig:
        """Return the configuration, completed from the model's file; by default as it is. Raises INVALID."""
        return source.config

    @abstractmethod
    async def load(self, source: ModelSource, context: "BackendContext") -> Model:
        """Load one version. Raises SluiceError with the reason that the repository's index will show."""

    def start_loading_early(self) -> None:  # noqa: B027 - a hook that most leave empty
        """Import slow libraries. Called once, on a thread, when the first model of this backend is to be loaded."""

    def check(self, source: ModelSource) -> RuntimeReport | None:
        """Check a model for `sluice repository check`, without loading it. Reads the file system: for a thread.

        Raises SluiceError with the reason for which it would not load. Returns the runtime where the backend chooses
        one by model and machine, else None.
        """
        return None

    def file_findings(self, source: ModelSource) -> Iterator[Finding]:
        """Yield a note for each thing in a version's own files that does not do what it seems to. For a thread."""
        return iter(())

    def machine_findings(self, config: ModelConfig) -> Iterator[Finding]:
        """Yield a note for each thing that this machine lacks to run the model: another machine may serve it."""
        return iter(())


class ModelLookup(Protocol):
    """The loaded models, for backends that call others."""

    def find(self, name: str, version: int = -1) -> Model:
        """Return that version of the model, the highest ready one for -1. Raises NOT_FOUND or UNAVAILABLE."""
        ...


@dataclass(frozen=True, slots=True)
class LoadOverrides:
    """A load request's contents: a whole configuration as JSON, and files by path that replace the model's folder."""

    config_json: str | None = None
    files: tuple[tuple[str, bytes], ...] = ()


class ModelControl(Protocol):
    """The repository, for models that load and unload others."""

    async def load(self, name: str, overrides: LoadOverrides | None = None) -> None:
        """Load a model. Raises SluiceError in Triton's words, UNAVAILABLE in other control modes than explicit."""

    async def unload(self, name: str, unload_dependents: bool = False) -> None:
        """Unload a model. Raises as `load`; an unknown name is no error."""


class CustomMetricKind(StrEnum):
    """Kinds of metrics that models may create."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


class CustomMetric(Protocol):
    """One labelled series of a model's own metric. Event loop's thread only."""

    def increment(self, value: float) -> None:
        """Add to the value. Raises INVALID below 0 for a counter, UNIMPLEMENTED for a histogram."""

    def set(self, value: float) -> None:
        """Set the value. Raises UNIMPLEMENTED unless it is a gauge."""

    def observe(self, value: float) -> None:
        """Count an observation. Raises UNIMPLEMENTED unless it is a histogram."""

    def value(self) -> float:
        """Return the value. Raises UNIMPLEMENTED for a histogram."""

    def release(self) -> None:
        """Note that the model has dropped it. As in Triton the series stays, and may be created again. Idempotent."""


class CustomMetricFamily(Protocol):
    """A metric's name with its series. Event loop's thread only."""

    def metric(self, labels: Mapping[str, str], buckets: Sequence[float] | None = None) -> CustomMetric:
        """Return the series of those labels, the same for equal ones. Raises INVALID for wrong buckets."""

    def release(self) -> None:
        """Note that the model has deleted it. It goes with its series once all its creators have. Idempotent."""


class CustomMetrics(Protocol):
    """The metrics of a server's models (Triton's custom metrics)."""

    def family(self, name: str, description: str, kind: CustomMetricKind) -> CustomMetricFamily:
        """Return the family of that name. Raises ALREADY_EXISTS where it exists with another kind."""


@dataclass(frozen=True, slots=True)
class BackendContext:
    """Services of the server that every backend gets. A backend that needs more gets it where it is registered."""

    models: ModelLookup
    backend_options: dict[str, dict[str, str]] = field(default_factory=dict)
    """`--backend-config=NAME,KEY=VALUE`, by backend and key."""
    control: ModelControl | None = None
    custom_metrics: CustomMetrics | None = None
    """Registers metrics that models create; None where the server exposes none."""
    rate_limiter: RateLimiter | None = None
    """Limits the resources that instances use together; None for no limit."""
    response_cache: ResponseCache | None = None
    """Keeps responses (`--cache-config`); None: each model has a cache in memory of its own."""
    host_policies: dict[str, HostPolicy] = field(default_factory=dict)
    """`--host-policy`, by name."""
    latencies: LatencyOptions = field(default_factory=LatencyOptions)
    """Latencies that are measured of every model (`--metrics-config`)."""
    loop_turn: LoopTurn = field(default_factory=LoopTurn)
    """Shared by the instances whose short runs the event loop does itself."""
