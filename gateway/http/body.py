"""Reads request bodies, never more of one than is allowed."""

import asyncio

from fastapi import Request
from starlette.requests import ClientDisconnect

from sluice.errors import ErrorCode, SluiceError

PATIENCE_S = 60.0
"""Longest silence within a body: a client that stops half way must not hold its connection for ever."""


async def read_body(request: Request, limit_bytes: int) -> bytes:
    """The whole body.

    Raises TOO_LARGE as soon as it is known to exceed `limit_bytes` (from its Content-Length, or
    while chunks arrive), DEADLINE where the client stops sending, and ClientDisconnect where it left.
    """
    declared = int(request.headers.get("content-length", 0))
    if declared > limit_bytes:
        raise _too_large(f"is {declared} bytes", limit_bytes)
    body = bytearray()
    more_body = True
    while more_body:
        chunk, more_body = await _next_chunk(request)
        body += chunk
        if len(body) > limit_bytes:
            raise _too_large("is longer", limit_bytes)
    return bytes(body)


async def _next_chunk(request: Request) -> tuple[bytes, bool]:
    """The next piece of the body, and whether more follows."""
    try:
        async with asyncio.timeout(PATIENCE_S):
            message = await request.receive()
    except TimeoutError:
        text = f"the request's body stopped arriving for {PATIENCE_S:.0f} s"
        raise SluiceError(ErrorCode.DEADLINE, text) from None
    if message["type"] == "http.disconnect":
        raise ClientDisconnect
    return message.get("body", b""), message.get("more_body", False)


def _too_large(what: str, limit_bytes: int) -> SluiceError:
    text = f"request body {what}; at most {limit_bytes} bytes are allowed (--http-max-input-size)"
    return SluiceError(ErrorCode.TOO_LARGE, text)
