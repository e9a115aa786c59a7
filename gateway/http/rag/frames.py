"""The server-sent events of an answer, by name: sources, token, citations, usage, error."""

from typing import Any

import orjson

from gateway.http.errors import openai_error_body
from gateway.http.sse import encode_text
from sluice.errors import SluiceError


def named_frame(name: bytes, payload: Any) -> bytes:
    """An event of that name, which carries `payload` as JSON."""
    return b"event: " + name + b"\ndata: " + orjson.dumps(payload) + b"\n\n"


def token_frame(text: str) -> bytes:
    return b'event: token\ndata: {"text":' + encode_text(text) + b"}\n\n"


def error_frame(error: SluiceError) -> bytes:
    """The last event of a stream that failed; no `[DONE]` follows it."""
    return b"event: error\ndata: " + openai_error_body(error) + b"\n\n"
