"""Reads server-sent events strictly: whatever is not an event of ours fails the test."""

import json
from typing import Any


def events_of(body: bytes) -> list[Any]:
    """Return the JSON of every event in `body`, and `[DONE]` as it is."""
    *frames, rest = body.split(b"\n\n")
    assert rest == b"", f"the stream ends within an event: {rest!r}"
    return [_payload(frame) for frame in frames]


def _payload(frame: bytes) -> Any:
    assert frame.startswith(b"data: "), frame
    assert b"\n" not in frame, frame
    data = frame.removeprefix(b"data: ")
    return "[DONE]" if data == b"[DONE]" else json.loads(data)
