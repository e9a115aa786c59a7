"""Reads the server-sent events of a streamed answer."""

from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any, NamedTuple

import orjson

DONE = "[DONE]"


class SseEvent(NamedTuple):
    """An event with its JSON. The last event of a complete answer of many routes is DONE, without payload."""

    name: str
    payload: Any


async def parse_events(chunks: AsyncIterator[bytes]) -> AsyncGenerator[SseEvent, None]:
    """Yield the events in `chunks`, which may be cut anywhere. Comments and an incomplete last event are dropped."""
    rest = b""
    async for chunk in chunks:
        *frames, rest = (rest + chunk).split(b"\n\n")
        for frame in frames:
            if (event := _parse_event(frame)) is not None:
                yield event


def _parse_event(frame: bytes) -> SseEvent | None:
    name, payload = "message", None
    for line in frame.split(b"\n"):  # not splitlines(): the text itself may contain U+2028
        field, _, value = line.partition(b": ")
        if field == b"event":
            name = value.decode()
        elif field == b"data":
            payload = value
    if payload is None:
        return None
    if payload == DONE.encode():
        return SseEvent(DONE, None)
    return SseEvent(name, orjson.loads(payload))
