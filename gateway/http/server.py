"""uvicorn on sockets that are already open, with an HTTP protocol that bounds what uvicorn leaves unbounded."""

import asyncio
import contextlib
import logging
import socket
from collections.abc import Callable, Generator
from http import HTTPStatus
from typing import Any, cast

import httptools
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from gateway.http.errors import broken_request_body
from gateway.http.request import choose_request_id
from gateway.http.sse import PIECE_WRITER

log = logging.getLogger(__name__)

_KEEP_ALIVE_S = 75
"""Seconds that an idle connection stays open: longer than in the pools of common clients, so that they close first."""

MAX_HEAD_BYTES = 64 << 10
"""Most bytes of request line and headers. The parser itself would collect them without end."""
HEAD_TIMEOUT_S = 30.0
"""Longest time from the first byte of a request (or from connecting) to the end of its headers."""
_BYTES_PER_BODY_BYTE = 17
"""Bytes that one byte of a body may take on the wire: chunks of one byte and a short extension. The rest is framing."""
NAMES_AS_SENT = "sluice.header_names"
"""Key of the ASGI scope's extension whose `names` are the headers' names as the client wrote them, in order."""

MAX_CHUNKS = 1 << 16
"""Most pieces of a body in chunks. Each costs more than its bytes."""
LINGER_S = 2.0
"""Longest time that a refused client may go on to send. Closing at once would discard the answer it has not read."""
_REFUSAL = (
    "HTTP/1.1 {status.value} {status.phrase}\r\ncontent-type: application/json\r\ncontent-length: {length}\r\n"
    "connection: close\r\nx-request-id: {request_id}\r\n\r\n"
)
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

    What is no HTTP is refused in JSON, with a request id. The protocol also keeps the headers' names as they were sent:
    uvicorn passes them on in lower case, and Triton's clients find forwarded headers among the request's parameters as
    they wrote them.
    """

    url = b""
    _framing_bytes = 0
    _has_ended_in_piece = False
    _head_began = 0.0
    _is_in_head = True
    _is_piece_shared = False
    _is_refused = False
    _num_chunks = 0
    _head_timer: asyncio.TimerHandle

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        stream = cast(asyncio.Transport, transport)
        super().connection_made(stream)
        self.transport = cast(asyncio.Transport, CorkedTransport(stream, self.loop, self._linger))
        self._begin_head()
        self._head_timer = self.loop.call_later(HEAD_TIMEOUT_S, self._check_head_age)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._is_piece_shared = self._has_ended_in_piece
        self._names: list[bytes] = []
        self._extensions: dict[str, Any] = {NAMES_AS_SENT: {"names": self._names}}
        self.scope["extensions"] = self._extensions
        self._begin_head()

    def on_header(self, name: bytes, value: bytes) -> None:
        self._names.append(name)
        super().on_header(name, value)

    def data_received(self, data: bytes) -> None:
        """Parse what came. A request to change the protocol is answered as if it did not ask for that."""
        if self._is_refused:
            return
        self._unset_keepalive_if_required()
        self._has_ended_in_piece = self._is_piece_shared = False
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            pass
        except httptools.HttpParserError as error:
            self._refuse(HTTPStatus.BAD_REQUEST, f"the request is not valid HTTP: {error}")
            return
        # Where a client was answered before its body was read, one piece holds the rest of it and the next head, and
        # how much is whose is not known: such a piece counts for nothing.
        self._framing_bytes = 0 if self._is_piece_shared else max(0, self._framing_bytes + len(data))
        if self._framing_bytes > MAX_HEAD_BYTES:
            text = f"the request's line, headers and trailers exceed {MAX_HEAD_BYTES} bytes"
            self._refuse(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, text)

    def on_body(self, body: bytes) -> None:
        self._framing_bytes -= len(body) * _BYTES_PER_BODY_BYTE
        super().on_body(body)

    def on_headers_complete(self) -> None:
        self._is_in_head = False
        self._num_chunks = 0
        super().on_headers_complete()
        self._extensions[PIECE_WRITER] = PieceWriter(self.cycle).write

    def on_message_complete(self) -> None:
        self._has_ended_in_piece = True
        super().on_message_complete()

    def on_chunk_complete(self) -> None:
        """Count a chunk; the last, empty one is more than the limit only where the others are at it."""
        self._num_chunks += 1
        if self._num_chunks > MAX_CHUNKS + 1:
            limit = f"maximum of {MAX_CHUNKS} non-empty chunks"
            text = f"Chunked request body exceeds {limit}. Send fewer or larger HTTP chunks."
            self._refuse(HTTPStatus.BAD_REQUEST, text)

    def connection_lost(self, exc: Exception | None) -> None:
        self._head_timer.cancel()
        super().connection_lost(exc)

    def _begin_head(self) -> None:
        self._is_in_head = True
        self._framing_bytes = 0
        self._head_began = self.loop.time()

    def _check_head_age(self) -> None:
        """Refuse a request whose head is late, and close a connection without one; else look again when it would be.

        There is one timer for each connection, not one for each request.
        """
        age_s = self.loop.time() - self._head_began
        if self._is_in_head and age_s >= HEAD_TIMEOUT_S:
            if self._framing_bytes:
                text = f"the request's headers did not end within {HEAD_TIMEOUT_S:.0f} s"
                self._refuse(HTTPStatus.REQUEST_TIMEOUT, text)
            else:
                self.timeout_keep_alive_handler()
            return
        wait_s = HEAD_TIMEOUT_S - age_s if self._is_in_head else HEAD_TIMEOUT_S
        self._head_timer = self.loop.call_later(wait_s, self._check_head_age)

    def _refuse(self, status: HTTPStatus, message: str) -> None:
        """Answer a request that cannot be read, and close. An earlier one that is not answered yet has the line."""
        self._is_refused = True
        if self.transport.is_closing():
            return
        is_line_taken = self.cycle is not None and not self.cycle.response_complete
        if is_line_taken and (self._is_in_head or self.cycle.response_started):
            self.transport.close()
            return
        request_id = choose_request_id(self.headers or ())
        log.info("request %s refused: %s", request_id, message)
        body = broken_request_body(self.url.decode("latin-1"), status, message)
        head = _REFUSAL.format(status=status, length=len(body), request_id=request_id)
        self.transport.write(head.encode() + body)
        self.transport.close()
        if is_line_taken:  # nobody reads the rest of its body
            self.cycle.disconnected = True
            self.cycle.message_event.set()

    def _linger(self, close: Callable[[], None]) -> None:
        """Close. Where the client is still sending, end the answer first and read on, so that it can be read."""
        is_sending = self._is_refused or (self.cycle is not None and self.cycle.more_body)
        if not is_sending or not self.transport.can_write_eof():
            close()
            return
        self._is_refused = True
        self.flow.resume_reading()
        self.transport.write_eof()
        self.loop.call_later(LINGER_S, close)


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
