"""Reads the server-sent events of an answer."""

from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any, NamedTuple

import orjson

DONE = "[DONE]"


class Event(NamedTuple):
    """`payload` is the event's JSON. The last of a whole answer has the name DONE and none."""

    name: str
    payload: Any


async def events_of(chunks: AsyncIterator[bytes]) -> AsyncGenerator[Event, None]:
    """The events in `chunks`, wherever those are cut. What follows the last whole one is left out."""
    rest = b""
    async for chunk in chunks:
        *frames, rest = (rest + chunk).split(b"\n\n")
        for frame in frames:
            yield _event(frame)


def _event(frame: bytes) -> Event:
    name, payload = "message", b"null"
    for line in frame.split(b"\n"):  # no other line ends: the text itself may hold U+2028
        field, _, value = line.partition(b": ")
        if field == b"event":
            name = value.decode()
        elif field == b"data":
            payload = value
    if payload == DONE.encode():
        return Event(DONE, None)
    return Event(name, orjson.loads(payload))
