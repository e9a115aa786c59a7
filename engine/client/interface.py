"""Names what the rooms above use of an engine: of one (`EngineClient`), or of several as one
(`sluice.engine.fleet`)."""

from collections.abc import Mapping, Sequence
from typing import Protocol

from sluice.engine.client.stream import GenerationStream
from sluice.engine.config import EngineConfig
from sluice.engine.frames import SleepMode
from sluice.engine.statistics import EngineStats
from sluice.engine.types import EngineInfo, GenerateRequest
from sluice.errors import SluiceError


class SleepSwitch(Protocol):
    """Puts an engine to sleep and wakes it, and knows whether it sleeps."""

    @property
    def is_sleeping(self) -> bool: ...

    async def sleep(self, level: int = 1, mode: SleepMode = "abort") -> None:
        """Stop generating; see `sluice.engine.frames.Sleep`. Raises the engine's error where it cannot."""

    async def wake_up(self, tags: list[str] | None = None) -> None:
        """Go on, or give memory back to the parts that `tags` name; see `sluice.engine.frames.WakeUp`."""


class Engine(Protocol):
    """Generates for requests. All methods run on one event loop. The properties are those of `EngineClient`."""

    @property
    def config(self) -> EngineConfig: ...
    @property
    def info(self) -> EngineInfo: ...
    @property
    def stats(self) -> EngineStats: ...
    @property
    def failure(self) -> str | None: ...
    @property
    def can_restart(self) -> bool: ...
    @property
    def is_restarting(self) -> bool: ...
    @property
    def is_asleep(self) -> bool:
        """Whether there is no engine, and one may be started for requests (`wait_awake`)."""

    @property
    def num_restarts(self) -> int: ...
    @property
    def recovery_seconds_total(self) -> float: ...
    @property
    def last_recovery_s(self) -> float: ...
    @property
    def num_resumed(self) -> int: ...
    @property
    def num_poisoned(self) -> int: ...
    @property
    def adapters(self) -> Mapping[str, str]: ...
    @property
    def adapter_marks(self) -> Mapping[str, str]: ...
    @property
    def sleeping(self) -> SleepSwitch: ...
    @property
    def pids(self) -> Sequence[int]:
        """Ids of the processes that run the engine; none for an engine that this process has not started."""

    async def start(self) -> None:
        """Load the model. Returns when requests are taken. Raises SluiceError if loading fails."""

    async def stop(self) -> None:
        """End the engine. Open streams end in an error. Idempotent."""

    def kill(self) -> None:
        """End the engine's processes now. Only for a process that is about to exit itself; otherwise use `stop`."""

    async def wait_awake(self) -> None:
        """Wait while it `is_asleep`. Raises OVERLOADED where too many wait, UNAVAILABLE where none comes in time."""

    def submit(self, request: GenerateRequest) -> GenerationStream:
        """Queue `request`. Raises INVALID for one that can never be served, UNAVAILABLE without an engine, OVERLOADED
        for a full queue; the stream may raise that with its first event."""

    async def load_adapter(self, name: str, path: str, *, replaces: bool = False) -> None:
        """Load the LoRA adapter in the folder `path`. Raises INVALID for a name that is taken, unless it `replaces`
        that adapter, and the engine's error for one that it does not take; nothing has changed then."""

    async def unload_adapter(self, name: str) -> None:
        """Remove a LoRA adapter. Requests in flight with it end as usual. Raises NOT_FOUND for an unknown name."""

    def refuse_if_full(self) -> None:
        """Raise OVERLOADED if a request would find a full queue. For callers with work to do before they submit."""

    def abort_all(self, error: SluiceError) -> None:
        """End every open stream with `error` and free its resources."""

    def heartbeat_age_s(self) -> float:
        """Return the seconds since an engine was last heard."""
