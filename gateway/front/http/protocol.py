"""uvicorn's HTTP protocol with bounds on what uvicorn leaves unbounded."""

import asyncio
import logging
import re
from collections.abc import Callable, Collection
from http import HTTPStatus
from typing import Any, cast

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from sluice.gateway.front.http.exchange import HOT_ENDING, ConnectionExchange, HotRoutes
from sluice.gateway.front.http.framing import HTTP2_PREFACE, FaultError, check_odd_head, framed, refusal, shown
from sluice.gateway.front.http.request import choose_request_id
from sluice.gateway.front.http.sse import PIECE_WRITER
from sluice.gateway.front.http.switching import UPGRADE, Upgrade
from sluice.gateway.front.http.writing import ConnectionTransport, PieceWriter, holding_head, is_plain
from sluice.gateway.front.listeners import UNREAD_LOOK_S, has_unread

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
"""Longest body of a hot route that is waited for before its exchange begins, and for how long."""
MAX_CHUNKS = 1 << 16
"""Most pieces of a body in chunks. Each costs more than its bytes."""
LINGER_S = 2.0
"""Longest time that a refused client may go on to send. Closing at once would discard the answer it has not read."""
_MAX_WAITING = 256
"""Most requests of a connection that wait for the answer to one before them."""
_FRAMING_HEADERS = frozenset((b"expect", b"host", b"transfer-encoding"))
_HOST = re.compile(rb"[\w.~!$&'()*+,;=:%\[\]-]*", re.ASCII)
"""The characters of a host and port. Others would change what is taken for the request's path."""


class ConnectionState(ServerState):
    """The state that the connections of a server share."""

    is_draining = False
    """Whether each connection ends with the next answer."""
    hot: HotRoutes | None = None
    """Answers plain requests without the application."""
    socket_paths: Collection[str] = ()
    """Paths of the application where requests may change the protocol to WebSocket."""


class BoundedHttpProtocol(HttpToolsProtocol):
    """uvicorn's HTTP protocol with bounds on the size of a request's head and on the time it takes to arrive.

    What is no HTTP is refused in JSON, with a request id, after the answers to the requests before it. A wish to change
    the protocol (Upgrade) is declined, except for WebSocket on the paths that have it: its request is answered as if it
    had none. The protocol also keeps the headers' names as they were sent: uvicorn passes them on in lower case, and
    Triton's clients find forwarded headers among the request's parameters as they wrote them.
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
    _last_words = b""
    """The refusal of a request, which waits for the answers to those before it."""
    _hosts: tuple[bytes, ...] = ()
    _coding = b""
    """A Transfer-Encoding that is not read."""
    _held_body: bytes | None = None
    """The body, as far as it has come, of a request of a hot route; None: the application has it."""
    _exchange: ConnectionExchange | None = None
    """The request of a hot route that is being answered."""
    _hold_timer: asyncio.TimerHandle | None = None
    _num_chunks = 0
    _head_timer: asyncio.TimerHandle
    _upgrade: Upgrade | None = None
    """The wish of the last request of the connection to change the protocol."""
    _behind_upgrade = b""
    """What has come behind it."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._stream = stream = cast(asyncio.Transport, transport)
        super().connection_made(stream)
        self._joined_writes = ConnectionTransport(stream, self.loop, self._linger)
        self.transport = cast(asyncio.Transport, self._joined_writes)
        self._hot = self.server_state.hot
        self._begin_head()
        self._head_timer = self.loop.call_later(HEAD_TIMEOUT_S, self._check_head_age)

    def on_message_begin(self) -> None:
        self.url = b""
        self.headers = []
        self.expect_100_continue = False
        self._is_piece_shared = self._has_ended_in_piece
        self._names: list[bytes] = []
        self._hosts, self._coding = (), b""
        self._begin_head()

    def on_header(self, name: bytes, value: bytes) -> None:
        """Note a header. The fields behind a body in chunks are none: they may say nothing about it."""
        if not self._is_in_head:
            return
        self._names.append(name)
        name = name.lower()
        if name in _FRAMING_HEADERS:
            self._note_framing(name, value)
        self.headers.append((name, value))

    def _note_framing(self, name: bytes, value: bytes) -> None:
        if name == b"host":
            self._hosts = (*self._hosts, value.strip())
        elif name == b"expect":
            self.expect_100_continue |= value.strip().lower() == b"100-continue"
        elif value.strip().lower() != b"chunked":
            self._coding = value

    def data_received(self, data: bytes) -> None:
        """Parse what came."""
        if self._is_refused:
            return
        if self._upgrade is not None:
            self._behind_upgrade += data
            return
        self._idle_since = 0.0
        self._has_ended_in_piece = self._is_piece_shared = False
        try:
            self._parse(data)
        except httptools.HttpParserError as error:
            self._refuse_unread(error)
            return
        if self._held_body is not None:
            self._hold_on(self._held_body)
        # Where a client was answered before its body was read, one piece holds the rest of it and the next head, and
        # how much is whose is not known: such a piece counts for nothing.
        self._framing_bytes = 0 if self._is_piece_shared else max(0, self._framing_bytes + len(data))
        if self._framing_bytes > MAX_HEAD_BYTES:
            text = f"the request's line, headers and trailers exceed {MAX_HEAD_BYTES} bytes"
            self._refuse(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, text)

    def _parse(self, data: bytes) -> None:
        """Feed the parser, which stops behind a head that asks for another protocol: a new one begins with the same
        head without that, and goes on with the body."""
        rest: bytes | memoryview = data
        while True:
            try:
                self.parser.feed_data(rest)
                return
            except httptools.HttpParserUpgrade as wish:
                rest = memoryview(rest)[wish.args[0] :]
            if self._takes_upgrade():
                self._begin_upgrade(bytes(rest))
                return
            framing_bytes, head = self._framing_bytes, self._head_without_upgrade()
            self.parser = httptools.HttpRequestParser(self)
            self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
            self.parser.feed_data(head)
            self._framing_bytes = framing_bytes

    def _takes_upgrade(self) -> bool:
        """Whether the request may go on with WebSocket: its head asks for that where it is served."""
        parser, state, path = self.parser, self.server_state, self.url.partition(b"?")[0]
        return (
            path.decode("latin-1") in state.socket_paths
            and parser.get_method() == b"GET"
            and parser.get_http_version() == "1.1"
            and any(name == b"upgrade" and value.lower() == b"websocket" for name, value in self.headers)
            and not self._is_busy
            and not state.is_draining
        )

    def _begin_upgrade(self, rest: bytes) -> None:
        """Give the request to the application, which accepts or declines. Nothing more is read before."""
        self.flow.pause_reading()
        self._behind_upgrade = rest
        self._upgrade = Upgrade(self.app, self.connections, self._switch)
        self._is_in_head = False
        self._begin_cycle()
        self.cycle.more_body = self.cycle.keep_alive = False

    def _switch(self, protocol: asyncio.Protocol, head: bytes) -> None:
        """Write the head of the answer that accepts, and give the connection its new protocol."""
        self._head_timer.cancel()
        self.connections.discard(self)
        self.cycle.response_started = self.cycle.response_complete = True
        protocol.connection_made(self._stream)
        if self.cycle.disconnected:
            protocol.connection_lost(None)
            return
        self._stream.write(head)
        self._stream.set_protocol(protocol)
        if self._behind_upgrade:
            protocol.data_received(self._behind_upgrade)
        self.flow.resume_reading()

    def _head_without_upgrade(self) -> bytes:
        line = b"%b %b HTTP/%b\r\n" % (self.parser.get_method(), self.url, self.parser.get_http_version().encode())
        pairs = zip(self._names, self.headers, strict=True)
        lines = [b"%b: %b\r\n" % (sent, value) for sent, (name, value) in pairs if name != b"upgrade"]
        return b"".join((line, *lines, b"\r\n"))

    def _refuse_unread(self, error: httptools.HttpParserError) -> None:
        """Refuse what the parser could not read, or did not go on with."""
        fault = error.__context__
        if isinstance(fault, FaultError):
            self._refuse(fault.status, fault.message)
        elif fault is not None:
            log.error("reading a request met an unexpected %s", type(fault).__name__, exc_info=fault)
            self._refuse(HTTPStatus.INTERNAL_SERVER_ERROR, "internal server error; the server's log has the details")
        else:
            what = HTTP2_PREFACE if self.url == b"*" and not self.headers else error
            self._refuse(HTTPStatus.BAD_REQUEST, f"the request is not valid HTTP: {what}")

    def on_body(self, body: bytes) -> None:
        self._framing_bytes -= len(body) * _BYTES_PER_BODY_BYTE
        if self._held_body is None:
            super().on_body(body)
        else:
            self._held_body += body

    def on_headers_complete(self) -> None:
        parser = self.parser
        version = parser.get_http_version()
        if parser.should_upgrade() and parser.get_method() != b"CONNECT":
            if self._takes_upgrade():
                self._check_head(version)
            return  # else the head will be parsed again, without that
        self._check_head(version)
        self._is_in_head = False
        self._num_chunks = 0
        if self._is_hot(version):
            self._held_body = b""
        else:
            self._begin_cycle()

    def _check_head(self, version: str) -> None:
        """Raise FaultError for a head that must not be answered as it asks (RFC 9112)."""
        is_usual = version == "1.1" and len(self._hosts) == 1 and not self._coding and self.url.startswith(b"/")
        if not is_usual:
            self.url = check_odd_head(self.parser.get_method(), self.url, version, self._hosts, self._coding)
        if self._hosts and _HOST.fullmatch(self._hosts[0]) is None:
            raise FaultError(f"host must be a host and port, got {shown(self._hosts[0])}")
        if len(self.pipeline) >= _MAX_WAITING:
            raise FaultError(f"more than {_MAX_WAITING} requests of the connection wait for the answer to another")

    def _is_hot(self, version: str) -> bool:
        """Whether the request may be answered without the application: its head asks for nothing else."""
        hot, parser = self._hot, self.parser
        return (
            hot is not None
            and self.url.endswith(HOT_ENDING)
            and hot.takes(self.url, self.headers)
            and parser.get_method() == b"POST"
            and version == "1.1"
            and parser.should_keep_alive()
            and not self.expect_100_continue
            and not self.flow.write_paused
            and not self.server_state.is_draining
            and not self._is_busy
        )

    @property
    def _is_busy(self) -> bool:
        """Whether a request has not been answered."""
        return self._exchange is not None or (self.cycle is not None and not self.cycle.response_complete)

    def _begin_cycle(self) -> None:
        """Give the request to the application. Its scope is made only now: an exchange needs none."""
        url, headers, expects_100 = self.url, self.headers, self.expect_100_continue
        super().on_message_begin()
        self.url, self.headers, self.expect_100_continue = url, headers, expects_100
        extensions: dict[str, Any] = {NAMES_AS_SENT: {"names": self._names}}
        if self._upgrade is not None:
            extensions[UPGRADE] = self._upgrade
        self.scope["headers"] = headers
        self.scope["extensions"] = extensions
        super().on_headers_complete()
        if self.server_state.is_draining:
            self.cycle.keep_alive = False
        if is_plain(self.cycle):
            extensions[PIECE_WRITER] = PieceWriter(self.cycle)

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        if self._exchange is not None:  # its answer comes first
            self.flow.pause_reading()
            self.pipeline.appendleft((cycle, app))
            return
        app = holding_head(app, self._joined_writes)
        if self._upgrade is not None:
            app = self._upgrade.serve(app)
        if not is_plain(cycle):
            app = framed(app, cycle)
        super()._start_asgi_task(cycle, app)

    def on_message_complete(self) -> None:
        if self.parser.should_upgrade():
            return
        self._has_ended_in_piece = True
        body = self._held_body
        if body is None:
            super().on_message_complete()
            return
        self._held_body = None
        self._stop_holding()
        self._begin_exchange(body)

    def _begin_exchange(self, body: bytes) -> None:
        assert self._hot is not None
        self._exchange = ConnectionExchange(self, self.url, self.headers, self._names, body, self._end_exchange)
        self.cycle = cast(RequestResponseCycle, None)  # it has ended
        self._hot.begin(self._exchange)

    def _end_exchange(self) -> None:
        """Note that the answer of the exchange is complete."""
        self._exchange = None
        self.on_response_complete()

    def _hold_on(self, body: bytes) -> None:
        """Wait a little for the rest of a short body: many clients send head and body separately."""
        declared = next((value for name, value in self.headers if name == b"content-length"), b"0")
        if len(body) > _HELD_BYTES or int(declared) > _HELD_BYTES:
            self._hand_over()
        elif self._hold_timer is None:
            self._hold_timer = self.loop.call_later(_HELD_S, self._hand_over)

    def _hand_over(self) -> None:
        """Give a request whose body is long, or slow to come, to the application, with what has come of it."""
        self._stop_holding()
        body, self._held_body = self._held_body, None
        if body is not None:
            self._begin_cycle()
            super().on_body(body)

    def _stop_holding(self) -> None:
        if self._hold_timer is not None:
            self._hold_timer.cancel()
            self._hold_timer = None

    def on_chunk_complete(self) -> None:
        """Count a chunk; the last, empty one is more than the limit only where the others are at it."""
        self._num_chunks += 1
        if self._num_chunks > MAX_CHUNKS + 1:
            limit = f"maximum of {MAX_CHUNKS} non-empty chunks"
            text = f"Chunked request body exceeds {limit}. Send fewer or larger HTTP chunks."
            raise FaultError(text)

    def on_response_complete(self) -> None:
        """Begin the next request of the connection, where it has come, else note since when there is none."""
        if self.pipeline or self.transport.is_closing():
            super().on_response_complete()
            return
        if self._last_words:
            self._write_last_words()
        self.server_state.total_requests += 1
        self.flow.resume_reading()
        self._idle_since = self.loop.time()

    def connection_lost(self, exc: Exception | None) -> None:
        self._head_timer.cancel()
        self._hand_over()
        exchange, self._exchange = self._exchange, None
        super().connection_lost(exc)
        if exchange is not None:
            exchange.leave()

    def shutdown(self) -> None:
        """Close where there is no request, else after its answer."""
        self._hand_over()
        if self._exchange is not None:
            self._exchange.keep_alive = False
        elif not self._is_busy and has_unread(self.transport):
            self.loop.call_later(UNREAD_LOOK_S, self.shutdown)
        else:
            super().shutdown()

    def end_when_idle(self, idle_s: float, began_at: float) -> None:
        """Announce the end with an answer that has not begun, else close once no request has come for `idle_s`, counted
        from `began_at` of the loop's time and from the last answer. Called again and again.

        A client that was told nothing may send its next request at the end of an answer."""
        exchange, cycle = self._exchange, self.cycle
        if exchange is not None:
            if not exchange.has_started:
                exchange.keep_alive = False
        elif self._is_busy:
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
        """Answer a request that cannot be read, after those before it, and close."""
        if self._is_refused or self.transport.is_closing():
            return
        self._is_refused = True
        request_id = choose_request_id(self.headers or ())
        log.info("request %s refused: %s", request_id, message)
        self._last_words = refusal(self.url, status, message, request_id)
        self._give_up_body()
        if not self._is_busy or (self.cycle is not None and self.cycle.disconnected):
            self._write_last_words()

    def _give_up_body(self) -> None:
        """Let go of the request whose body cannot be read, if there is one: nobody reads the rest of it."""
        self._stop_holding()
        is_held, self._held_body = self._held_body is not None, None
        cycle = self.cycle
        if self._is_in_head or is_held or cycle is None:
            return
        if cycle.response_started:  # nothing that follows may look like an answer
            self._last_words = b""
        if self.pipeline and self.pipeline[0][0] is cycle:
            self.pipeline.popleft()
        elif not cycle.response_complete:
            cycle.disconnected = True
            cycle.message_event.set()

    def _write_last_words(self) -> None:
        if self._last_words:
            self.transport.write(self._last_words)
        self.transport.close()

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
