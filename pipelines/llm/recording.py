"""A generation under measurement: what every protocol does with the events of an LLM."""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import TypeVar

from engine.types import FinishReason
from pipelines.llm.services import StreamRecord
from pipelines.text.types import TextEvent
from sluice.errors import ErrorCode, SluiceError

_BROKEN_OFF = (FinishReason.CANCELLED, FinishReason.ERROR)
"""Reasons that the engine, not the client, ended a request for: the client must see no clean end."""

Event = TypeVar("Event", bound=TextEvent)


async def recorded(events: AsyncGenerator[Event, None], record: StreamRecord) -> AsyncGenerator[Event, None]:
    """The same events, each observed by `record`, which is closed at the end, however it comes.

    The record counts from when it was opened, so open it with the request. Closing the generator closes `events`.
    Raises SluiceError UNAVAILABLE where the engine broke the generation off.
    """
    try:
        async with aclosing(events):
            async for event in events:
                if event.finish_reason is not None and event.finish_reason in _BROKEN_OFF:
                    raise SluiceError(ErrorCode.UNAVAILABLE, "the engine ended the request before it was complete")
                record.observe(event)
                yield event
    except Exception as error:
        record.fail(error)
        raise
    finally:
        record.close()
