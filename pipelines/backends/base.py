"""What a backend is: it completes configurations and turns a folder into a model.

Backends are found by entry point: group `sluice.backends`, the name as `backend` in config.pbtxt has it, the object a
`Backend` class that takes no arguments. Sluice's own register the same way, in pyproject.toml.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from tritonclient.grpc.model_config_pb2 import ModelConfig

from engine.config import EngineConfig, Runtime
from pipelines.backends.host_policy import HostPolicy
from pipelines.backends.placement import Placement
from pipelines.inference.custom_metrics import CustomMetrics
from pipelines.inference.job import Job
from pipelines.inference.latencies import LatencyOptions
from pipelines.inference.model import Model

if TYPE_CHECKING:
    from pipelines.batching.rate_limiter import RateLimiter
    from pipelines.caching.store import CacheStore
    from pipelines.rag.library import Library
    from pipelines.repository.types import LoadOverrides
    from pipelines.text.types import TextEvent


@dataclass(frozen=True, slots=True)
class ModelSource:
    """Where a model version comes from.

    `folder` is the model's (it holds config.pbtxt), `version_folder` its numbered one, which an ensemble may lack.
    `config` is complete once `complete` and the repository's own defaults have been through it.
    """

    folder: Path
    version: int
    config: ModelConfig

    @property
    def name(self) -> str:
        return str(self.config.name)

    @property
    def version_folder(self) -> Path:
        return self.folder / str(self.version)

    @property
    def model_file(self) -> Path:
        """`default_model_filename` in the version's folder."""
        return self.version_folder / str(self.config.default_model_filename)


class ModelLookup(Protocol):
    """The loaded models, for backends that call others."""

    def find(self, name: str, version: int = -1) -> Model:
        """The version of that name, the highest ready one for -1. Raises SluiceError NOT_FOUND or UNAVAILABLE."""
        ...


class ModelControl(Protocol):
    """The repository, for models that load and unload others."""

    async def load(self, name: str, overrides: "LoadOverrides | None" = None) -> None:
        """Raises SluiceError in Triton's words, UNAVAILABLE in other control modes than explicit."""

    async def unload(self, name: str, unload_dependents: bool = False) -> None:
        """Raises as `load`; not for a name that there is not."""


class StreamRecord(Protocol):
    """The measurements of one LLM request: tokens, time to first token, gaps."""

    def observe(self, event: "TextEvent") -> None: ...
    def fail(self, error: Exception) -> None: ...
    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """Time limits of requests to an LLM that name none themselves; None is no limit."""

    timeout_s: float | None = None
    queue_timeout_s: float | None = None


@dataclass(frozen=True, slots=True)
class BackendContext:
    """What the server lends its backends."""

    models: ModelLookup
    engine_config: Callable[[str], EngineConfig]
    """The options of the command line as a configuration for the checkpoint in that folder."""
    open_record: Callable[[str, str], StreamRecord]
    """Begins to measure a request to an LLM, by model and protocol."""
    engine_heartbeat_timeout_s: float = 10.0
    request_limits: RequestLimits = field(default_factory=RequestLimits)
    backend_options: dict[str, dict[str, str]] = field(default_factory=dict)
    """`--backend-config=NAME,KEY=VALUE`, by backend and key."""
    control: ModelControl | None = None
    custom_metrics: CustomMetrics | None = None
    """Where models put metrics of their own; None where nobody reads them."""
    rate_limiter: "RateLimiter | None" = None
    """Who limits what instances take together; None: nobody does."""
    engine_config_on: Callable[[str, Runtime], EngineConfig] | None = None
    """The same on the runtime that a model names: defaults depend on it. None: nothing else does."""
    response_cache: "CacheStore | None" = None
    """Where responses are kept (`--cache-config`); None: each model in a memory of its own."""
    host_policies: dict[str, HostPolicy] = field(default_factory=dict)
    """`--host-policy`, by name."""
    latencies: LatencyOptions = field(default_factory=LatencyOptions)
    """What is measured of every model (`--metrics-config`)."""
    native_text_stages: bool = False
    """Whether NVIDIA's Python stages around a token model are served by our own (`--native-text-stages`)."""
    library: "Library | None" = None
    """The server's collections of documents (`--rag-store`); None where it has none."""


class Backend(ABC):
    """One kind of model. Methods run on the event loop and hand slow work to threads."""

    name: str
    """As config.pbtxt's `backend` has it."""
    default_model_filename: str = ""
    """What `default_model_filename` is completed to; "" where the kind has no model file."""

    async def complete(self, source: ModelSource, context: BackendContext) -> ModelConfig:
        """The configuration with what the model file tells and config.pbtxt left out. By default as it is.

        Raises SluiceError INVALID where what was given contradicts the model.
        """
        return source.config

    @abstractmethod
    async def load(self, source: ModelSource, context: BackendContext) -> Model:
        """Load one version. Raises SluiceError with the reason that the repository's index will show."""

    def start_loading_early(self) -> None:  # noqa: B027 - a hook that most leave empty
        """Import what is slow to import; called on a thread when a repository names this backend."""


class Instance(ABC):
    """One copy of a model that runs one batch at a time: what `pipelines/batching` schedules onto."""

    name: str
    placement: Placement | None = None
    """Where it runs; None where nothing depends on it."""

    num_starts: int = 0
    """How often what it runs in has started: with every start, all that a model kept of its sequences is gone."""

    @property
    def is_ready(self) -> bool:
        """Whether it takes a batch now or will: false while its process is being restarted."""
        return True

    @abstractmethod
    def execute(self, jobs: list[Job], done: Callable[[], None]) -> None:
        """Run `jobs` as one batch, on the event loop, without blocking it and without raising.

        Every job gets its responses, the last one final; errors go to the jobs. `done` is called once, when the
        instance takes the next batch (a decoupled model may then still be answering). Sets the times in the jobs.
        A job cancelled meanwhile still ends with a final response, which nobody sees. In place of a final response a
        job may be given back with `Job.reschedule`.
        """

    @abstractmethod
    async def close(self) -> None:
        """Free it; jobs under way end in an error. Idempotent."""
