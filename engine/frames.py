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


Command = Submit | Cancel | Shutdown


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


Report = Ready | LoadFailed | StepFrame


def request_failed(stream_id: int, error: SluiceError) -> RequestFailed:
    """Make the event that ends a stream with `error`."""
    return RequestFailed(stream_id, error.code, error.message, error.param, error.retry_after_s)
