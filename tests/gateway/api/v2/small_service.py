"""The service as the v2 protocol needs it: models that a test makes, and nothing else."""

import asyncio
import logging
from collections.abc import Iterable, Mapping
from typing import Any

from sluice.errors import ErrorCode, SluiceError
from sluice.gateway.api.v2.log_settings import LogSettings
from sluice.gateway.api.v2.server import V2Server
from sluice.gateway.api.v2.shared_memory import SharedMemoryRegistry
from sluice.gateway.api.v2.trace_settings import TraceSettings
from sluice.gateway.calls import CallLog
from sluice.gateway.plane.health import ServerHealth
from sluice.gateway.plane.models import ModelFinder
from sluice.gateway.telemetry.tracer import Tracer
from sluice.serving.backend import LoadOverrides
from sluice.serving.model import Model
from sluice.serving.repository.managed_model import IndexEntry, ModelState
from sluice.serving.repository.routing import Routing
from sluice.serving.request import LATEST

UNSERVED = (IndexEntry("broken", 1, ModelState.UNAVAILABLE, "it is broken"), IndexEntry("on_demand"))
"""Models of the index that are not loaded."""


class SmallRepository:
    """Loaded models, and a record of the calls that change them. A load of `nope` fails."""

    problem = ""

    def __init__(self, models: Iterable[Model] = ()) -> None:
        self.loaded = list(models)
        self.calls: list[tuple[object, ...]] = []
        self.begun: list[str] = []
        """Names of the models whose load has begun."""
        self.may_load = asyncio.Event()
        self.may_load.set()

    def models(self) -> list[Model]:
        return self.loaded

    def versions(self, name: str) -> list[Model]:
        found = [model for model in self.loaded if model.name == name]
        if not found:
            raise SluiceError(ErrorCode.NOT_FOUND, f"Request for unknown model: '{name}' is not found")
        return sorted(found, key=lambda model: model.version)

    def find(self, name: str, version: int = LATEST) -> Model:
        models = self.versions(name)
        found = models[-1:] if version == LATEST else [model for model in models if model.version == version]
        if not found:
            text = f"Request for unknown model: '{name}' version {version} is not found"
            raise SluiceError(ErrorCode.NOT_FOUND, text)
        return found[0]

    def route(self, name: str, version: int = LATEST, key: str = "") -> Model:
        return self.find(name, version)

    def routing(self, name: str) -> Routing:
        return Routing(None, {model.version: 1.0 for model in self.versions(name)[-1:]}, is_set=False)

    def set_weights(self, name: str, weights: Mapping[int, float] | None) -> None:
        raise AssertionError("nobody sets weights here")

    async def refresh(self) -> None:
        """Do nothing: there are no folders."""

    def index(self, ready_only: bool) -> list[IndexEntry]:
        ready = [IndexEntry(model.name, model.version, ModelState.READY) for model in self.loaded]
        return ready if ready_only else [*ready, *UNSERVED]

    async def load(self, name: str, overrides: LoadOverrides | None) -> None:
        self.begun.append(name)
        await self.may_load.wait()
        self.calls.append(("load", name, overrides))
        if name == "nope":
            text = "failed to load 'nope', failed to poll from model repository"
            raise SluiceError(ErrorCode.INTERNAL, text)

    async def unload(self, name: str, unload_dependents: bool) -> None:
        self.calls.append(("unload", name, unload_dependents))


class SmallAdapters:
    """The adapter `polite` of `llama`; records calls in those of the repository."""

    def __init__(self, repository: SmallRepository) -> None:
        self._calls = repository.calls

    def index(self) -> list[IndexEntry]:
        return []

    def base_of(self, name: str) -> str | None:
        return None

    def is_known(self, name: str) -> bool:
        return name in ("polite", "llama:polite")

    async def load(self, name: str, path: str, base: str, *, replaces: bool) -> str:
        self._calls.append(("load_adapter", name, path, base, replaces))
        return name

    async def unload(self, name: str, base: str) -> str:
        self._calls.append(("unload_adapter", name, base))
        return name


class SmallService(V2Server):
    """A server over `models`, live and ready."""

    repository: Any

    def __init__(self, *models: Model, trace: TraceSettings | None = None) -> None:
        self.calls = CallLog()
        self.name = "triton"
        self.repository = SmallRepository(models)
        self.health = ServerHealth(self.repository, 1.0)
        self.health.begin_serving()
        self.models = ModelFinder(self.repository, self.health)
        self.adapters: Any = SmallAdapters(self.repository)
        self.shared_memory = SharedMemoryRegistry(is_allowed=True)
        self.trace = trace or TraceSettings()
        self.tracer = Tracer()
        self.log_settings = LogSettings(logging.Logger("small", logging.INFO))
        self.takes_model_files = True
