"""A WebSocket connection after its handshake: messages in, texts out, within bounds whatever its client sends."""

import asyncio
import re
from collections import deque
from collections.abc import Mapping
from time import perf_counter
from typing import Any, cast

from wsproto.connection import Connection, ConnectionState, ConnectionType
from wsproto.events import BytesMessage, CloseConnection, Event, Message, Ping, TextMessage
from wsproto.utilities import LocalProtocolError, generate_accept_token

from sluice.errors import SluiceError, invalid
from sluice.gateway.front.http.errors import body_too_large

GOING_AWAY, SERVICE_RESTART = 1001, 1012
"""Codes of a close: of a client that has left, and of a server that ends."""
PING_S = 20.0
"""Time between two pings, which keep proxies from taking the connection for dead. Nobody is closed for no pong: clients
read nothing while they run a tool, and TCP finds out which are gone."""
LINGER_S = 2.0
"""Longest time that a client has to answer a close."""
_PIECE_BYTES = 2 << 10
_TURN_S, _SHORT_TURN_S = 0.005, 0.0005
"""How much is parsed at once, and for how long until as much time is left to others: a frame may have two bytes, and
takes some microseconds. After more than the short time, too, since the event loop reads a connection up to 32 times
before it turns to others."""
_MAX_QUEUED = 4
"""Most whole messages that wait to be received."""
_SHOWN_CHARS = 60


_VERSION = "13"
_KEY = re.compile(r"[A-Za-z0-9+/]{22}==", re.ASCII)


def accept_headers(headers: Mapping[str, str]) -> dict[str, str]:
    """Return the headers with which a handshake is accepted. Raises INVALID for one that is none (RFC 6455)."""
    version, key = headers.get("sec-websocket-version", ""), headers.get("sec-websocket-key", "").strip()
    for name, value, is_right, expected in (
        ("sec-websocket-version", version, version == _VERSION, _VERSION),
        ("sec-websocket-key", key, _KEY.fullmatch(key) is not None, "16 bytes in base64"),
    ):
        if not is_right:
            raise invalid(name, f"{name} must be {expected}, got {value[:_SHOWN_CHARS]!r}")
    token = generate_accept_token(key.encode()).decode()
    return {"upgrade": "websocket", "connection": "Upgrade", "sec-websocket-accept": token}


class SocketMessage:
    """A message, as far as it has come."""

    def __init__(self) -> None:
        self.body = bytearray()
        self.problem: SluiceError | None = None
        """Why it is not read: then its body is empty."""


class MessageSocket(asyncio.Protocol):
    """A WebSocket connection that answers text with text. Belongs to the event loop.

    Reading pauses while whole messages wait, pongs are dropped while the client reads nothing, and a message is parsed
    as it arrives, so that the connection holds little more than one message.
    """

    def __init__(self, connections: set[Any], max_bytes: int) -> None:
        """`connections` are the server's open ones. A message has `max_bytes` at most."""
        self.num_open = 0
        """Messages whose answers are not complete: the connection does not end before."""
        self._connections = connections
        self._max_bytes = max_bytes
        self._frames = Connection(ConnectionType.SERVER)
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport
        self._unread = bytearray()
        self._is_late = False
        """Whether reading goes on in another turn of the event loop."""
        self._message: SocketMessage | None = None
        self._queue: deque[SocketMessage | None] = deque()
        self._arrived = asyncio.Event()
        self._writable = asyncio.Event()
        self._writable.set()
        self._farewell: tuple[bytes, int] | None = None
        self._idle_since = self._loop.time()
        self._timer: asyncio.TimerHandle | None = None

    # --- asyncio ---

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._connections.add(self)
        self._timer = self._loop.call_later(PING_S, self._ping)

    def connection_lost(self, exc: Exception | None) -> None:
        self._connections.discard(self)
        if self._timer is not None:
            self._timer.cancel()
        self._writable.set()
        self._put(None)

    def pause_writing(self) -> None:
        self._writable.clear()

    def resume_writing(self) -> None:
        self._writable.set()

    def data_received(self, data: bytes) -> None:
        self._unread += data
        if not self._is_late:
            self._read()

    # --- messages ---

    @property
    def is_open(self) -> bool:
        return self._frames.state is ConnectionState.OPEN and not self._transport.is_closing()

    async def receive(self) -> SocketMessage | None:
        """Return the next message; None at the end of the connection."""
        while not self._queue:
            self._arrived.clear()
            await self._arrived.wait()
        message = self._queue[0]
        if message is not None:
            self._queue.popleft()
            if not self._is_late:
                self._read()
        return message

    def write_now(self, *texts: bytes) -> bool:
        """Write messages of UTF-8. Returns whether the client reads what was written, so that the next may follow
        before `drain`."""
        self._send(*[Message(data=text.decode()) for text in texts])
        return self._writable.is_set()

    async def drain(self) -> None:
        """Wait until the client reads what was written."""
        await self._writable.wait()

    def finish_one(self) -> None:
        """Note that the answer to a message is complete."""
        self.num_open -= 1
        self._idle_since = self._loop.time()
        self._end_if_idle()

    def end(self, farewell: bytes, code: int) -> None:
        """Close with a last message, b"" for none, once all answers are complete."""
        self._farewell = self._farewell or (farewell, code)
        self._end_if_idle()

    def shutdown(self) -> None:
        """Close as a server that ends does."""
        self.end(b"", SERVICE_RESTART)

    def end_when_idle(self, idle_s: float, began_at: float) -> None:
        """Close where there was no open answer for `idle_s`, counted from `began_at` of the loop's time."""
        if not self.num_open and self._loop.time() - max(began_at, self._idle_since) >= idle_s:
            self.shutdown()

    # --- reading ---

    def _read(self) -> None:
        """Parse what has come, for a while, unless messages wait."""
        self._is_late = False
        began = perf_counter()
        while self._unread and len(self._queue) < _MAX_QUEUED and not self._is_late:
            piece = bytes(self._unread[:_PIECE_BYTES])
            del self._unread[:_PIECE_BYTES]
            self._parse(piece)
            took_s = perf_counter() - began
            if took_s > (_TURN_S if self._unread else _SHORT_TURN_S):
                self._is_late = True
                self._loop.call_later(took_s, self._read)
        if self._is_late or self._unread or len(self._queue) >= _MAX_QUEUED:
            self._transport.pause_reading()
        elif not self._transport.is_closing():
            self._transport.resume_reading()

    def _parse(self, piece: bytes) -> None:
        try:
            self._frames.receive_data(piece)
            for event in self._frames.events():
                self._handle(event)
        except LocalProtocolError:
            self._unread.clear()  # the connection is closed

    def _handle(self, event: Event) -> None:
        match event:
            case TextMessage() | BytesMessage():
                self._add(event)
            case Ping():
                if self._writable.is_set():
                    self._send(event.response())
            case CloseConnection():
                self._take_close(event)

    def _take_close(self, event: CloseConnection) -> None:
        """End with the client, or because of what it sent."""
        if self._frames.state is ConnectionState.OPEN:
            self._unread.clear()
            self._close(int(event.code), event.reason or "")
            return
        if self._frames.state is ConnectionState.REMOTE_CLOSING:
            self._transport.write(self._frames.send(event.response()))
        self._put(None)
        self._transport.close()

    def _add(self, event: TextMessage | BytesMessage) -> None:
        """Add a piece to the message that arrives. Of one that is not read nothing is kept."""
        message = self._message = self._message or SocketMessage()
        if isinstance(event, BytesMessage):
            message.problem = message.problem or invalid("type", "a message must be JSON text, got a binary one")
        elif message.problem is None:
            message.body += event.data.encode()
            if len(message.body) > self._max_bytes:
                message.problem = body_too_large("is longer", self._max_bytes)
                message.body.clear()
        if event.message_finished:
            self._message = None
            self._put(message)

    def _put(self, message: SocketMessage | None) -> None:
        self._queue.append(message)
        self._arrived.set()

    # --- writing ---

    def _send(self, *sent: Event) -> None:
        """Send events in one write, which is a system call."""
        if sent and self.is_open:
            self._transport.write(b"".join(map(self._frames.send, sent)))

    def _ping(self) -> None:
        self._timer = self._loop.call_later(PING_S, self._ping)
        if self._writable.is_set():
            self._send(Ping())

    def _end_if_idle(self) -> None:
        if self._farewell is None or self.num_open or not self.is_open:
            return
        farewell, code = self._farewell
        if farewell:
            self.write_now(farewell)
        self._close(code)

    def _close(self, code: int, reason: str = "") -> None:
        """Say that the connection ends, and give the client some time to answer."""
        self._send(CloseConnection(code=code, reason=reason))
        self._put(None)
        self._loop.call_later(LINGER_S, self._transport.close)
