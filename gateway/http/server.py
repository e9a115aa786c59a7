"""uvicorn on sockets that are already open, with an HTTP protocol that bounds what uvicorn leaves unbounded."""

import asyncio
import contextlib
import socket
from collections.abc import Generator
from typing import Any

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

_KEEP_ALIVE_S = 75
"""Seconds that an idle connection stays open: longer than in the pools of common clients, so that they close first."""

MAX_HEAD_BYTES = 64 << 10
"""Most bytes of request line and headers. The parser itself would collect them without end."""
HEAD_TIMEOUT_S = 30.0
"""Longest time from the first byte of a request (or from connecting) to the end of its headers."""
NAMES_AS_SENT = "sluice.header_names"
"""Key of the ASGI scope's extension that has the headers' names as the client wrote them, in order."""

_HEAD_TOO_LARGE = b"HTTP/1.1 431 Request Header Fields Too Large\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"
_RESPONSE_START = b"HTTP/1.1 "


class HttpServer:
    """One application on one listening socket. The process handles signals, not this server."""

    def __init__(self, app: ASGIApp, listener: socket.socket) -> None:
        self._listener = listener
        self._server = _SignallessServer(
            uvicorn.Config(
                app,
                http=BoundedHttpProtocol,
                ws="none",
                lifespan="off",
                loop="none",
                log_config=None,
                access_log=False,
                proxy_headers=False,
                server_header=False,
                timeout_keep_alive=_KEEP_ALIVE_S,
            )
        )
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to take requests, on the running event loop."""
        self._task = asyncio.create_task(self._server.serve([self._listener]), name="http-server")

    @property
    def task(self) -> asyncio.Task[None]:
        """Runs from `start` to `stop`; ends earlier only where the server breaks."""
        assert self._task is not None, "not started"
        return self._task

    def begin_stop(self) -> None:
        """Close the listener and idle connections; busy ones go on."""
        self._server.should_exit = True

    async def stop(self, timeout_s: float) -> None:
        """Give busy connections `timeout_s` to end, then drop them."""
        self.begin_stop()
        await asyncio.wait((self.task,), timeout=timeout_s)
        self._server.force_exit = True
        await self.task


class _SignallessServer(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield


class BoundedHttpProtocol(HttpToolsProtocol):
    """uvicorn's HTTP protocol with bounds on the size of a request's head and on the time it takes to arrive.

    It also keeps the headers' names as they were sent. uvicorn passes them on in lower case, and Triton's clients find
    forwarded headers among the request's parameters as they wrote them.
    """

    _head_bytes = 0
    _head_began = 0.0
    _is_in_head = True
    _head_timer: asyncio.TimerHandle

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.transport = CorkedTransport(transport, self.loop)  # type: ignore[assignment]
        self._begin_head()
        self._head_timer = self.loop.call_later(HEAD_TIMEOUT_S, self._check_head_age)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._names: list[bytes] = []
        self.scope["extensions"] = {NAMES_AS_SENT: self._names}  # type: ignore[dict-item]
        self._begin_head()

    def on_header(self, name: bytes, value: bytes) -> None:
        self._names.append(name)
        super().on_header(name, value)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._is_in_head:
            self._head_bytes += len(data)
            if self._head_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
                self.transport.write(_HEAD_TOO_LARGE)
                self.transport.close()

    def on_headers_complete(self) -> None:
        self._is_in_head = False
        super().on_headers_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        self._head_timer.cancel()
        super().connection_lost(exc)

    def _begin_head(self) -> None:
        self._is_in_head = True
        self._head_bytes = 0
        self._head_began = self.loop.time()

    def _check_head_age(self) -> None:
        """Close the connection where its head is late; else look again when it would be.

        There is one timer for each connection, not one for each request.
        """
        age_s = self.loop.time() - self._head_began
        if self._is_in_head and age_s >= HEAD_TIMEOUT_S:
            self.timeout_keep_alive_handler()
            return
        wait_s = HEAD_TIMEOUT_S - age_s if self._is_in_head else HEAD_TIMEOUT_S
        self._head_timer = self.loop.call_later(wait_s, self._check_head_age)


class CorkedTransport:
    """A transport that holds a response's head back until its body is written or the event loop's turn is over.

    uvicorn writes head and body separately, and each write is a system call.
    """

    __slots__ = ("_head", "_loop", "_transport")

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self._transport = transport
        self._loop = loop
        self._head = b""

    def write(self, piece: bytes) -> None:
        if self._head:
            piece, self._head = self._head + piece, b""
        elif piece.startswith(_RESPONSE_START):
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
