"""What the gRPC protocol needs of the service behind it."""

from typing import Protocol

from gateway.v2.description import ServerIdentity
from gateway.v2.settings import LogSettings, TraceSettings
from gateway.v2.shared_memory import SharedMemoryRegistry
from pipelines.inference.model import Model
from pipelines.repository.types import IndexEntry, LoadOverrides


class Repository(Protocol):
    """The models that there are; `pipelines.repository` says more."""

    def versions(self, name: str) -> list[Model]: ...

    def models(self) -> list[Model]: ...

    def index(self, ready_only: bool) -> list[IndexEntry]: ...

    async def load(self, name: str, overrides: LoadOverrides | None) -> None: ...

    async def unload(self, name: str, unload_dependents: bool) -> None: ...


class Service(Protocol):
    """The data plane. Every method may raise SluiceError; the probes do not."""

    @property
    def identity(self) -> ServerIdentity: ...

    @property
    def repository(self) -> Repository: ...

    @property
    def shared_memory(self) -> SharedMemoryRegistry: ...

    @property
    def trace(self) -> TraceSettings: ...

    @property
    def log_settings(self) -> LogSettings: ...

    def find(self, name: str, version: int) -> Model: ...

    def is_live(self) -> bool: ...

    def is_ready(self) -> bool: ...

    def is_model_ready(self, name: str, version: int) -> bool: ...
