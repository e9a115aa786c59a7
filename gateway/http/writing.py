"""How responses are written: pieces as chunks, and a head together with what follows it."""

import asyncio
from collections.abc import Callable
from typing import Any

from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

_RESPONSE_START = b"HTTP/1.1 "


def is_plain(cycle: RequestResponseCycle) -> bool:
    """Whether uvicorn frames the answer to a request as HTTP asks for: it is HTTP/1.1, no HEAD and has no `Expect`."""
    scope = cycle.scope
    return scope["http_version"] == "1.1" and scope["method"] != "HEAD" and not cycle.waiting_for_100_continue


class PieceWriter:
    """Writes pieces of a response of unknown length that has begun, as `RequestResponseCycle.send` does."""

    __slots__ = ("_cycle",)

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle = cycle

    async def write(self, piece: bytes) -> None:
        """Write a piece as a chunk; nothing where it is empty, which would be the last chunk."""
        cycle = self._cycle
        if cycle.flow.write_paused and not cycle.disconnected:
            await cycle.flow.drain()
        if piece and not cycle.disconnected:
            cycle.transport.write(b"%x\r\n%b\r\n" % (len(piece), piece))

    def is_open(self) -> bool:
        """Whether a piece would be written at once."""
        cycle = self._cycle
        return not cycle.flow.write_paused and not cycle.disconnected and not cycle.response_complete

    def write_now(self, piece: bytes) -> None:
        """Write a piece like `write`, while `is_open`."""
        if piece:
            self._cycle.transport.write(b"%x\r\n%b\r\n" % (len(piece), piece))


class CorkedTransport:
    """A transport that holds a response's head back until its body is written or the event loop's turn is over.

    uvicorn writes head and body separately, and each write is a system call.
    """

    __slots__ = ("_close", "_head", "_is_closing", "_loop", "_transport")

    def __init__(
        self,
        transport: asyncio.Transport,
        loop: asyncio.AbstractEventLoop,
        close: Callable[[Callable[[], None]], None] = lambda close: close(),
    ) -> None:
        """`close` is called once, with the function that closes the connection, and decides when it is called."""
        self._transport = transport
        self._loop = loop
        self._close = close
        self._head = b""
        self._is_closing = False

    def write(self, piece: bytes) -> None:
        if self._is_closing:
            return
        if self._head:
            piece, self._head = self._head + piece, b""
        elif piece.startswith(_RESPONSE_START):
            self._head = piece
            self._loop.call_soon(self.flush)
            return
        self._transport.write(piece)

    def write_whole(self, response: bytes) -> None:
        """Write a response with its head and body at once."""
        if not self._is_closing:
            self.flush()
            self._transport.write(response)

    def flush(self) -> None:
        """Write a head that nothing has followed yet."""
        if self._head:
            head, self._head = self._head, b""
            self._transport.write(head)

    def close(self) -> None:
        self.flush()
        if not self.is_closing():
            self._is_closing = True
            self._close(self._transport.close)

    def is_closing(self) -> bool:
        return self._is_closing or self._transport.is_closing()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)
