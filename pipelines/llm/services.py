"""Services that the server gives the backends of LLMs: engine options, measurement of requests, time limits."""

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass
from typing import Protocol, TypeVar

from engine.config import EngineConfig, Runtime
from engine.types import FinishReason
from pipelines.text.types import TextEvent
from sluice.errors import ErrorCode, SluiceError

_ENDED_EARLY = (FinishReason.CANCELLED, FinishReason.ERROR)
"""Reasons for which the engine, not the client, ended a request. The client must not see a clean end."""

Event = TypeVar("Event", bound=TextEvent)


class StreamRecord(Protocol):
    """The measurements of one LLM request: tokens, time to first token, gaps."""

    def observe(self, event: TextEvent) -> None: ...
    def fail(self, error: Exception) -> None: ...
    def close(self) -> None: ...


OpenRecord = Callable[[str, str], StreamRecord]
"""Opens the record of a request; takes the names of its model and protocol."""


class _NoRecord:
    """Measures nothing."""

    def observe(self, event: TextEvent) -> None: ...
    def fail(self, error: Exception) -> None: ...
    def close(self) -> None: ...


def no_record(model: str, protocol: str) -> StreamRecord:
    """Open a record that measures nothing."""
    return _NoRecord()


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """Time limits of requests to an LLM that have none of their own; None is no limit."""

    timeout_s: float | None = None
    queue_timeout_s: float | None = None


NO_LIMITS = RequestLimits()


def default_engine_config(model_path: str, runtime: Runtime | None = None) -> EngineConfig:
    """Return an engine's configuration without options of the command line."""
    return EngineConfig(model_path=model_path, runtime=runtime or Runtime.AUTO)


@dataclass(frozen=True, slots=True)
class LlmServices:
    """The services of one server."""

    engine_config: Callable[[str, Runtime | None], EngineConfig] = default_engine_config
    """Returns the command line's options for the checkpoint in a folder, on the runtime that the model may name."""
    open_record: OpenRecord = no_record
    heartbeat_timeout_s: float = 10.0
    """An engine without a heartbeat for this long is replaced."""
    limits: RequestLimits = NO_LIMITS


async def recorded(events: AsyncGenerator[Event, None], record: StreamRecord) -> AsyncGenerator[Event, None]:
    """Yield `events`, observe each with `record`, and close the record at the end, whatever ends the generation.

    The record measures from its opening, so open it with the request. Closing the generator closes `events`.
    Raises SluiceError UNAVAILABLE where the engine ended the generation before it was complete.
    """
    try:
        async with aclosing(events):
            async for event in events:
                if event.finish_reason is not None and event.finish_reason in _ENDED_EARLY:
                    raise SluiceError(ErrorCode.UNAVAILABLE, "the engine ended the request before it was complete")
                record.observe(event)
                yield event
    except Exception as error:
        record.fail(error)
        raise
    finally:
        record.close()
