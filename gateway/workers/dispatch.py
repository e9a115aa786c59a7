"""Which requests a worker answers itself, and which the host answers: those of language models whose engine it has."""

import asyncio
from collections.abc import Container
from contextlib import suppress

import msgspec
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from sluice.gateway.answers.streams.wishes import HEADERS
from sluice.gateway.front.http.request import BODY_TIMEOUT_S

OWN_PATHS = frozenset({"/v1/chat/completions", "/v1/completions", "/v1/messages", "/api/chat", "/api/generate"})
"""Paths of generation."""
MOST_BYTES = 1 << 20
"""Longer bodies are the host's, piece by piece."""


class Named(msgspec.Struct):
    """The one field of a body that matters here."""

    model: str = ""


_DECODER = msgspec.json.Decoder(Named)


class Dispatch:
    """Gives each request to the worker's own application or to the host's."""

    def __init__(self, own: ASGIApp, host: ASGIApp, models: Container[str]) -> None:
        """`models` has the names of the models that the worker serves now."""
        self._own = own
        self._host = host
        self._models = models

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["method"] != "POST" or scope["path"] not in OWN_PATHS or not _may_be_own(scope):
            await self._host(scope, receive, send)
            return
        read = await _read(receive)
        body = _whole(read)
        app = self._host if body is None or not self._serves(_name_model(body)) else self._own
        await app(scope, Replay(read, receive), send)

    def _serves(self, name: str) -> bool:
        return name in self._models or name.partition(":")[0] in self._models


def _may_be_own(scope: Scope) -> bool:
    """Whether its head says that a request is short, and asks for nothing that the host alone has."""
    length = b"0"
    for name, value in scope["headers"]:
        if name in HEADERS:  # only the host keeps streams
            return False
        if name == b"content-length":
            length = value
    return int(length) <= MOST_BYTES


def _name_model(body: bytes) -> str:
    try:
        return _DECODER.decode(body).model
    except (ValueError, RecursionError):
        return ""  # the host says what is wrong


async def _read(receive: Receive) -> list[Message]:
    """Return a request's messages up to the end of its body, or as many as a short body may have."""
    messages = [await receive()]
    num_bytes = len(messages[0].get("body", b""))
    with suppress(TimeoutError):  # the host refuses a client that stops sending
        async with asyncio.timeout(BODY_TIMEOUT_S):
            while messages[-1].get("more_body", False) and num_bytes <= MOST_BYTES:
                messages.append(await receive())
                num_bytes += len(messages[-1].get("body", b""))
    return messages


def _whole(messages: list[Message]) -> bytes | None:
    """Return the body; None for one that is longer, or whose client has disconnected."""
    last = messages[-1]
    if last["type"] != "http.request" or last.get("more_body", False):
        return None
    return b"".join(each.get("body", b"") for each in messages)


class Replay:
    """Receives what was read before, and then what follows."""

    __slots__ = ("_read", "_receive")

    def __init__(self, read: list[Message], receive: Receive) -> None:
        self._read = read[::-1]
        self._receive = receive

    async def __call__(self) -> Message:
        return self._read.pop() if self._read else await self._receive()
