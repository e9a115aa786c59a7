"""A service with models and nothing else, and the v2 application over it on a real server."""

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import httpx

from gateway.http.v2.app import V2App
from gateway.options.config import ServeConfig
from gateway.v2.log_settings import LogSettings
from gateway.v2.server import ServerIdentity
from gateway.v2.shared_memory import SharedMemoryRegistry
from gateway.v2.trace import TraceSettings
from serving.backend import LoadOverrides
from serving.model import Model
from serving.repository.routing import Routing
from serving.repository.types import IndexEntry, ModelState
from serving.request import InferRequest
from sluice.errors import ErrorCode, SluiceError
from tests.gateway.http.plain_server import PATIENCE_S, serving


@dataclass
class SmallRepository:
    """Knows its models; loads are only noted."""

    loaded: list[Model]
    calls: list[object] = field(default_factory=list)

    def models(self) -> list[Model]:
        return self.loaded

    def versions(self, name: str) -> list[Model]:
        found = [model for model in self.loaded if model.name == name]
        if not found:
            raise SluiceError(ErrorCode.NOT_FOUND, f"Request for unknown model: '{name}' is not found")
        return sorted(found, key=lambda model: model.version)

    def routing(self, name: str) -> Routing:
        return Routing(None, {model.version: 1.0 for model in self.versions(name)[-1:]}, is_set=False)

    def set_weights(self, name: str, weights: Mapping[int, float] | None) -> None:
        raise AssertionError("nobody sets weights here")

    async def refresh(self) -> None:
        """Nothing lies anywhere."""

    def index(self, ready_only: bool) -> list[IndexEntry]:
        rows = [IndexEntry(model.name, model.version, ModelState.READY) for model in self.loaded]
        return rows if ready_only else [*rows, IndexEntry("never"), IndexEntry("bad", 1, ModelState.UNAVAILABLE, "why")]

    async def load(self, name: str, overrides: LoadOverrides | None) -> None:
        self.calls.append(("load", name, overrides))
        if name == "nope":
            text = "failed to load 'nope', failed to poll from model repository"
            raise SluiceError(ErrorCode.INTERNAL, text)

    async def unload(self, name: str, unload_dependents: bool) -> None:
        self.calls.append(("unload", name, unload_dependents))


class SmallService:
    """What the v2 routes need."""

    def __init__(self, models: list[Model], trace: TraceSettings | None = None) -> None:
        self.identity = ServerIdentity("sluice", "1.2.3")
        self.repository = SmallRepository(models)
        self.shared_memory = SharedMemoryRegistry()
        self.trace = trace or TraceSettings()
        logger = logging.Logger("small", logging.INFO)
        self.log_settings = LogSettings(logger)
        self.is_up = True

    def find(self, name: str, version: int = -1) -> Model:
        models = self.repository.versions(name)
        found = models[-1:] if version == -1 else [model for model in models if model.version == version]
        if not found:
            text = f"Request for unknown model: '{name}' version {version} is not found"
            raise SluiceError(ErrorCode.NOT_FOUND, text)
        return found[0]

    def route(self, name: str, version: int = -1, key: str = "") -> Model:
        return self.find(name, version)

    def route_sequence(self, model: Model, request: InferRequest, version: int, key: str = "") -> Model:
        return model

    def has_weights(self, name: str) -> bool:
        return False

    def is_live(self) -> bool:
        return self.is_up

    def is_ready(self) -> bool:
        return self.is_up

    def is_model_ready(self, name: str, version: int) -> bool:
        try:
            return self.find(name, version).is_ready
        except SluiceError:
            return False


@dataclass
class SmallServer:
    """A running one."""

    service: SmallService
    client: httpx.Client
    url: str

    def get(self, path: str) -> httpx.Response:
        return self.client.get(path)

    def post(self, path: str, body: object = None, **headers: str) -> httpx.Response:
        """POST bytes as they are, anything else as JSON; nothing as no body."""
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        if body is None:
            return self.client.post(path, headers=named)
        if isinstance(body, bytes):
            return self.client.post(path, content=body, headers=named)
        return self.client.post(path, json=body, headers=named)


@contextmanager
def small_server(
    service: SmallService, config: ServeConfig | None = None, forwarded: str | None = None
) -> Iterator[SmallServer]:
    config = config or ServeConfig()
    config = replace(config, http=replace(config.http, forwarded_headers=forwarded))
    with (
        serving(V2App(service, config)) as url,
        httpx.Client(base_url=url, timeout=PATIENCE_S, headers={"accept-encoding": ""}) as client,
    ):
        yield SmallServer(service, client, url)
