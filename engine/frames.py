"""Messages between an engine and its clients: commands down, reports up. Within one process they are passed as objects;
between processes they travel as msgpack, one message in each ZeroMQ frame."""

import msgspec

from engine.types import EngineInfo, EngineStats, GenerateRequest, RequestFailed, TokenEvent
from sluice.errors import ErrorCode, SluiceError


class Submit(msgspec.Struct, frozen=True, array_like=True, tag="submit"):
    """Queue a request. `stream_id` must be unused in this engine."""

    stream_id: int
    request: GenerateRequest
    was_accepted: bool = False
    """Whether an engine that is lost had accepted the request. This one then takes it even if its queue is full."""


class Cancel(msgspec.Struct, frozen=True, array_like=True, tag="cancel"):
    """Cancel a request, in whatever state it is."""

    stream_id: int


class Shutdown(msgspec.Struct, frozen=True, array_like=True, tag="shutdown"):
    """End the engine now; running sequences end as cancelled."""


class LoadAdapter(msgspec.Struct, frozen=True, array_like=True, tag="load_adapter"):
    """Load the LoRA adapter in the folder `path`, in place of an adapter of the same name. A frame with its
    `AdapterOutcome` answers. Requests in flight with the adapter that it replaces end with that one."""

    name: str
    path: str


class UnloadAdapter(msgspec.Struct, frozen=True, array_like=True, tag="unload_adapter"):
    """Remove a LoRA adapter, answered by an `AdapterOutcome`. Requests in flight with it end as usual."""

    name: str


Command = Submit | Cancel | Shutdown | LoadAdapter | UnloadAdapter


class AdapterOutcome(msgspec.Struct, frozen=True, array_like=True):
    """The answer to a command about the LoRA adapter `name`: the code and message of its error, or the names that
    requests may use from now on."""

    name: str
    code: ErrorCode | None = None
    message: str = ""
    adapters: tuple[str, ...] = ()

    def check(self) -> None:
        """Raise the error, if there is one."""
        if self.code is not None:
            raise SluiceError(self.code, self.message, param="lora_name")


class Ready(msgspec.Struct, frozen=True, array_like=True, tag="ready"):
    """The model is loaded."""

    info: EngineInfo


class LoadFailed(msgspec.Struct, frozen=True, array_like=True, tag="load_failed"):
    """The model could not be loaded; the engine ends."""

    code: ErrorCode
    message: str


class StepFrame(msgspec.Struct, frozen=True, array_like=True, tag="step"):
    """The outcome of one step for all sequences. A frame without events is a heartbeat."""

    events: list[TokenEvent]
    failures: list[RequestFailed]
    stats: EngineStats
    adapters: list[AdapterOutcome] = []


Report = Ready | LoadFailed | StepFrame


def request_failed(stream_id: int, error: SluiceError) -> RequestFailed:
    """Make the event that ends a stream with `error`."""
    return RequestFailed(stream_id, error.code, error.message, error.param, error.retry_after_s)
