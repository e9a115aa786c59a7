"""What the engine and its clients say to each other. In one process these are passed as they are;
between processes they travel as msgpack, one message a ZeroMQ frame."""

import msgspec

from engine.types import EngineInfo, EngineStats, GenerateRequest, RequestFailed, TokenEvent
from sluice.errors import ErrorCode, SluiceError


class Submit(msgspec.Struct, frozen=True, array_like=True, tag="submit"):
    """Queue a request. `stream_id` must be unused in this engine."""

    stream_id: int
    request: GenerateRequest
    was_accepted: bool = False
    """By an engine that is gone: then this one has no say in it, however full its queue is."""


class Cancel(msgspec.Struct, frozen=True, array_like=True, tag="cancel"):
    """The client no longer wants this request; legal in every state."""

    stream_id: int


class Shutdown(msgspec.Struct, frozen=True, array_like=True, tag="shutdown"):
    """End the engine now; running sequences end as cancelled."""


Command = Submit | Cancel | Shutdown


class Ready(msgspec.Struct, frozen=True, array_like=True, tag="ready"):
    """The model is loaded."""

    info: EngineInfo


class LoadFailed(msgspec.Struct, frozen=True, array_like=True, tag="load_failed"):
    """The model could not be loaded; the engine is gone."""

    code: ErrorCode
    message: str


class StepFrame(msgspec.Struct, frozen=True, array_like=True, tag="step"):
    """Everything that one step brought, for all sequences at once. Without events it is a heartbeat."""

    events: list[TokenEvent]
    failures: list[RequestFailed]
    stats: EngineStats


Report = Ready | LoadFailed | StepFrame


def failed(stream_id: int, error: SluiceError) -> RequestFailed:
    """`error` as an event of this stream."""
    return RequestFailed(stream_id, error.code, error.message, error.param, error.retry_after_s)
