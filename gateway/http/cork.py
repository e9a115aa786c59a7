"""Head and body of a response in one write: uvicorn writes them apart, and each write is a system call."""

import asyncio
from typing import Any

_HEAD = b"HTTP/1.1 "


class CorkedTransport:
    """A transport that keeps a response's head until what follows it is written, or the event loop's turn is over."""

    __slots__ = ("_head", "_loop", "_transport")

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self._transport = transport
        self._loop = loop
        self._head = b""

    def write(self, piece: bytes) -> None:
        if self._head:
            piece, self._head = self._head + piece, b""
        elif piece.startswith(_HEAD):
            self._head = piece
            self._loop.call_soon(self.flush)
            return
        self._transport.write(piece)

    def flush(self) -> None:
        """Write a head that nothing has followed yet."""
        if self._head:
            head, self._head = self._head, b""
            self._transport.write(head)

    def close(self) -> None:
        self.flush()
        self._transport.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)
