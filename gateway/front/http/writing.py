"""How responses are written: pieces as chunks, and a connection that closes when its client has read them."""

import asyncio
from collections.abc import Callable
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle


def is_plain(cycle: RequestResponseCycle) -> bool:
    """Whether uvicorn frames the answer to a request as HTTP asks for: it is HTTP/1.1, no HEAD and has no `Expect`."""
    scope = cycle.scope
    return scope["http_version"] == "1.1" and scope["method"] != "HEAD" and not cycle.waiting_for_100_continue


class PieceWriter:
    """Writes pieces of a response of unknown length that has begun, as `RequestResponseCycle.send` does."""

    __slots__ = ("_cycle", "count")

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle = cycle
        self.count: Callable[[bytes], None] | None = None
        """Called with each piece that is written."""

    async def write(self, piece: bytes) -> None:
        """Write a piece once the client reads what was written before."""
        await self.drain()
        self.write_now(piece)

    def write_now(self, piece: bytes) -> bool:
        """Write a piece as a chunk; nothing where it is empty, which would be the last chunk. Returns whether the
        client reads what was written, so that the next piece may follow before `drain`."""
        cycle = self._cycle
        if piece and not cycle.disconnected:
            if self.count is not None:
                self.count(piece)
            cycle.transport.write(b"%x\r\n%b\r\n" % (len(piece), piece))
        return not cycle.flow.write_paused

    async def drain(self) -> None:
        """Wait until the client reads what was written."""
        cycle = self._cycle
        if cycle.flow.write_paused and not cycle.disconnected:
            await cycle.flow.drain()


class ConnectionTransport:
    """A transport that writes a response's head together with what follows it: each write is a system call.

    Its connection decides when it closes, so that a client may read its answer first.
    """

    __slots__ = ("_close", "_head", "_is_closing", "_is_head_next", "_loop", "_transport")

    def __init__(
        self,
        transport: asyncio.Transport,
        loop: asyncio.AbstractEventLoop,
        close: Callable[[Callable[[], None]], None],
    ) -> None:
        """`close` is called once, with the function that closes the connection, and decides when it is called."""
        self._transport = transport
        self._loop = loop
        self._close = close
        self._head = b""
        self._is_head_next = False
        self._is_closing = False

    def hold_head(self) -> None:
        """Hold the next write back until another one follows, or the event loop's turn is over."""
        self._is_head_next = True

    def write(self, piece: bytes) -> None:
        if self._is_closing:
            return
        if self._is_head_next:
            self._is_head_next = False
            self._head = piece
            self._loop.call_soon(self.flush)
            return
        if self._head:
            piece, self._head = self._head + piece, b""
        self._transport.write(piece)

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


def holding_head(app: ASGIApp, transport: ConnectionTransport) -> ASGIApp:
    """Return `app` with the head of its answer held back for what follows."""

    async def serve(scope: Scope, receive: Receive, send: Send) -> None:
        async def send_held(message: Message) -> None:
            if message["type"] == "http.response.start":
                transport.hold_head()
            await send(message)

        await app(scope, receive, send_held)

    return serve
