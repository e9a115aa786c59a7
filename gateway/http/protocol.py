"""uvicorn's HTTP protocol with bounds on what uvicorn leaves unbounded."""

import asyncio
import logging
from collections.abc import Callable
from http import HTTPStatus
from typing import Any, cast

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from gateway.http.direct import Direct, DirectExchange
from gateway.http.errors import broken_request_body
from gateway.http.request import choose_request_id
from gateway.http.sse import DIRECT_WRITER, PIECE_WRITER
from gateway.http.writing import CorkedTransport, PieceWriter
from gateway.standstill import UNREAD_LOOK_S, has_unread

log = logging.getLogger(__name__)

MAX_HEAD_BYTES = 64 << 10
"""Most bytes of request line and headers. The parser itself would collect them without end."""
HEAD_TIMEOUT_S = 30.0
"""Longest time from the first byte of a request (or from connecting) to the end of its headers."""
_BYTES_PER_BODY_BYTE = 17
"""Bytes that one byte of a body may take on the wire: chunks of one byte and a short extension. The rest is framing."""
NAMES_AS_SENT = "sluice.header_names"
"""Key of the ASGI scope's extension whose `names` are the headers' names as the client wrote them, in order."""

_HELD_BYTES, _HELD_S = 64 << 10, 0.1
"""Longest body that is waited for before a request is answered directly, and for how long."""
MAX_CHUNKS = 1 << 16
"""Most pieces of a body in chunks. Each costs more than its bytes."""
LINGER_S = 2.0
"""Longest time that a refused client may go on to send. Closing at once would discard the answer it has not read."""
_REFUSAL = (
    "HTTP/1.1 {status.value} {status.phrase}\r\ncontent-type: application/json\r\ncontent-length: {length}\r\n"
    "connection: close\r\nx-request-id: {request_id}\r\n\r\n"
)


class ConnectionState(ServerState):
    """The state that the connections of a server share."""

    is_draining = False
    """Whether each connection ends with the next answer."""
    direct: Direct | None = None
    """Answers plain requests without the application."""


class BoundedHttpProtocol(HttpToolsProtocol):
    """uvicorn's HTTP protocol with bounds on the size of a request's head and on the time it takes to arrive.

    What is no HTTP is refused in JSON, with a request id. The protocol also keeps the headers' names as they were sent:
    uvicorn passes them on in lower case, and Triton's clients find forwarded headers among the request's parameters as
    they wrote them.
    """

    server_state: ConnectionState
    url = b""
    _framing_bytes = 0
    _has_ended_in_piece = False
    _head_began = 0.0
    _idle_since = 0.0
    """When the last answer ended; 0 while there is a request, or its beginning."""
    _is_in_head = True
    _is_piece_shared = False
    _is_refused = False
    _held_body: bytes | None = None
    """The body, as far as it has come, of a request that may be answered directly; None: the application has it."""
    _hold_timer: asyncio.TimerHandle | None = None
    _num_chunks = 0
    _head_timer: asyncio.TimerHandle

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        stream = cast(asyncio.Transport, transport)
        super().connection_made(stream)
        self.transport = cast(asyncio.Transport, CorkedTransport(stream, self.loop, self._linger))
        self._direct = self.server_state.direct
        self._begin_head()
        self._head_timer = self.loop.call_later(HEAD_TIMEOUT_S, self._check_head_age)

    def on_message_begin(self) -> None:
        self.url = b""
        self.headers = []
        self.expect_100_continue = False
        self._is_piece_shared = self._has_ended_in_piece
        self._names: list[bytes] = []
        self._begin_head()

    def on_header(self, name: bytes, value: bytes) -> None:
        self._names.append(name)
        super().on_header(name, value)

    def data_received(self, data: bytes) -> None:
        """Parse what came. A request to change the protocol is answered as if it did not ask for that."""
        if self._is_refused:
            return
        self._idle_since = 0.0
        self._has_ended_in_piece = self._is_piece_shared = False
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            pass
        except httptools.HttpParserError as error:
            self._hand_over()
            self._refuse(HTTPStatus.BAD_REQUEST, f"the request is not valid HTTP: {error}")
            return
        if self._held_body is not None:
            self._hold_on(self._held_body)
        # Where a client was answered before its body was read, one piece holds the rest of it and the next head, and
        # how much is whose is not known: such a piece counts for nothing.
        self._framing_bytes = 0 if self._is_piece_shared else max(0, self._framing_bytes + len(data))
        if self._framing_bytes > MAX_HEAD_BYTES:
            text = f"the request's line, headers and trailers exceed {MAX_HEAD_BYTES} bytes"
            self._refuse(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, text)

    def on_body(self, body: bytes) -> None:
        self._framing_bytes -= len(body) * _BYTES_PER_BODY_BYTE
        if self._held_body is None:
            super().on_body(body)
        else:
            self._held_body += body

    def on_headers_complete(self) -> None:
        self._is_in_head = False
        self._num_chunks = 0
        if self._may_be_direct():
            self._held_body = b""
        else:
            self._begin_cycle()

    def _may_be_direct(self) -> bool:
        """Whether the request may be answered without the application: its head asks for nothing else."""
        direct, parser = self._direct, self.parser
        return (
            direct is not None
            and direct.takes(self.url)
            and parser.get_method() == b"POST"
            and parser.get_http_version() == "1.1"
            and parser.should_keep_alive()
            and not parser.should_upgrade()
            and not self.expect_100_continue
            and not self.flow.write_paused
            and not self.server_state.is_draining
            and (self.cycle is None or self.cycle.response_complete)
        )

    def _begin_cycle(self) -> None:
        """Give the request to the application. Its scope is made only now: direct requests need none."""
        url, headers, expects_100 = self.url, self.headers, self.expect_100_continue
        super().on_message_begin()
        self.url, self.headers, self.expect_100_continue = url, headers, expects_100
        extensions: dict[str, Any] = {NAMES_AS_SENT: {"names": self._names}}
        self.scope["headers"] = headers
        self.scope["extensions"] = extensions
        super().on_headers_complete()
        if self.server_state.is_draining:
            self.cycle.keep_alive = False
        writer = PieceWriter(self.cycle)
        extensions |= {PIECE_WRITER: writer.write, DIRECT_WRITER: writer}

    def on_message_complete(self) -> None:
        self._has_ended_in_piece = True
        if self._held_body is None or not self._answer_directly(self._held_body):
            self._hand_over()
            super().on_message_complete()

    def _answer_directly(self, body: bytes) -> bool:
        assert self._direct is not None
        exchange = DirectExchange(self, self.url, self.headers, body)
        before, self.cycle = self.cycle, cast(RequestResponseCycle, exchange)
        if self._direct.begin(exchange):
            self._held_body = None
            if self._hold_timer is not None:
                self._hold_timer.cancel()
                self._hold_timer = None
            return True
        self.cycle = before
        return False

    def _hold_on(self, body: bytes) -> None:
        """Wait a little for the rest of a short body: many clients send head and body separately."""
        declared = next((value for name, value in self.headers if name == b"content-length"), b"0")
        if len(body) > _HELD_BYTES or int(declared) > _HELD_BYTES:
            self._hand_over()
        elif self._hold_timer is None:
            self._hold_timer = self.loop.call_later(_HELD_S, self._hand_over)

    def _hand_over(self) -> None:
        """Give a request that is not answered directly to the application, with what has come of its body."""
        if self._hold_timer is not None:
            self._hold_timer.cancel()
            self._hold_timer = None
        body, self._held_body = self._held_body, None
        if body is not None:
            self._begin_cycle()
            super().on_body(body)

    def on_chunk_complete(self) -> None:
        """Count a chunk; the last, empty one is more than the limit only where the others are at it."""
        self._num_chunks += 1
        if self._num_chunks > MAX_CHUNKS + 1:
            limit = f"maximum of {MAX_CHUNKS} non-empty chunks"
            text = f"Chunked request body exceeds {limit}. Send fewer or larger HTTP chunks."
            self._refuse(HTTPStatus.BAD_REQUEST, text)

    def on_response_complete(self) -> None:
        """Begin the next request of the connection, where it has come, else note since when there is none."""
        if self.pipeline or self.transport.is_closing():
            super().on_response_complete()
            return
        self.server_state.total_requests += 1
        self.flow.resume_reading()
        self._idle_since = self.loop.time()

    def connection_lost(self, exc: Exception | None) -> None:
        self._head_timer.cancel()
        self._hand_over()
        super().connection_lost(exc)

    def shutdown(self) -> None:
        """Close where there is no request, else after its answer."""
        self._hand_over()
        is_busy = self.cycle is not None and not self.cycle.response_complete
        if not is_busy and has_unread(self.transport):
            self.loop.call_later(UNREAD_LOOK_S, self.shutdown)
        else:
            super().shutdown()

    def end_when_idle(self, idle_s: float, began_at: float) -> None:
        """Announce the end with an answer that has not begun, else close once no request has come for `idle_s`, counted
        from `began_at` of the loop's time and from the last answer. Called again and again.

        A client that was told nothing may send its next request at the end of an answer."""
        cycle = self.cycle
        if cycle is not None and not cycle.response_complete:
            if not cycle.response_started:
                cycle.keep_alive = False
        elif not (self._is_in_head and self._framing_bytes):
            idle_since = max(began_at, self._idle_since, self._head_began)
            if self.loop.time() - idle_since >= idle_s:
                self.shutdown()

    def _begin_head(self) -> None:
        self._is_in_head = True
        self._framing_bytes = 0
        self._head_began = self.loop.time()

    def _check_head_age(self) -> None:
        """Refuse a request whose head is late, and close a connection without one; else look again when it would be.

        There is one timer for each connection, not one for each request and another for each answer.
        """
        now = self.loop.time()
        left_s = self._idle_since + self.timeout_keep_alive - now if self._idle_since else HEAD_TIMEOUT_S
        head_left_s = self._head_began + HEAD_TIMEOUT_S - now if self._is_in_head else HEAD_TIMEOUT_S
        wait_s = min(left_s, head_left_s)
        if wait_s <= 0 and not has_unread(self.transport):
            self._give_up(is_idle=left_s <= 0 or not self._framing_bytes)
            return
        self._head_timer = self.loop.call_later(max(wait_s, UNREAD_LOOK_S), self._check_head_age)

    def _give_up(self, *, is_idle: bool) -> None:
        """Close a connection on which no request has come, or refuse one whose head did not end."""
        if is_idle:
            self.timeout_keep_alive_handler()
        else:
            text = f"the request's headers did not end within {HEAD_TIMEOUT_S:.0f} s"
            self._refuse(HTTPStatus.REQUEST_TIMEOUT, text)

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
