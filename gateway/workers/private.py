"""HTTP between the processes of one server, over Unix sockets that the permissions of their folder guard.

Each process serves its application there, with the routes that only the others may ask. A worker passes requests on to
the host's application; host and workers ask each other's private routes, in MessagePack.
"""

import asyncio
import logging
import socket
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from pathlib import Path
from time import monotonic
from typing import TypeVar, cast

import httptools
import msgspec
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from sluice.errors import ErrorCode, SluiceError
from sluice.gateway.front.http.errors import error_response
from sluice.gateway.front.http.protocol import NAMES_AS_SENT
from sluice.gateway.front.http.request import choose_request_id
from sluice.gateway.front.http.server import HttpServer
from sluice.gateway.front.http.switching import SWITCHING, UPGRADE, Upgrade, find_socket_paths

log = logging.getLogger(__name__)

T = TypeVar("T")
PrivateRoute = Callable[[bytes], Awaitable[object]]
"""Takes the body of a question, and returns the answer for MessagePack."""
_PRIVATE = "/private/"
_PEER = b"x-sluice-private-peer"
"""The header with the client's address and port, which only private sockets read."""
_HOP_HEADERS = frozenset((b"connection", b"expect", b"keep-alive", b"transfer-encoding", b"upgrade", _PEER))
"""Headers that are about one connection."""
_SWITCHING_HEADERS = frozenset((b"connection", b"upgrade"))
"""Those with which a request asks for another protocol."""
_ANSWER_HOP_HEADERS = frozenset((b"date", b"keep-alive", b"transfer-encoding"))
_BACKLOG = 2048
_MOST_IDLE = 64
_IDLE_S = 30.0
"""Longest time for which a connection waits for the next request: shorter than a server's, so that it is not closed at
the moment at which it is used."""
_READ_BYTES = 256 << 10
_PING_BYTES = 16
"""Length of a piece up to which it is perhaps a ping or a pong: these keep no relay from being idle."""


class PrivateServer:
    """Serves an application and private routes on a Unix socket. Belongs to the event loop."""

    def __init__(self, path: Path, routes: Mapping[str, PrivateRoute], app: ASGIApp | None = None) -> None:
        """`routes` are the private ones by name; `app` has all others."""
        self._path = path
        self._routes = routes
        self._app = app
        self.socket_paths = find_socket_paths(app)
        self._server: HttpServer | None = None

    def start(self) -> None:
        """Begin to take requests."""
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(str(self._path))
        listener.listen(_BACKLOG)
        listener.setblocking(False)
        self._server = HttpServer(self, listener)
        self._server.start()

    def end_sockets(self) -> None:
        """Close what other processes relay, each when it has no open answer."""
        if self._server is not None:
            self._server.end_sockets()

    async def stop(self, timeout_s: float) -> None:
        """Give open requests `timeout_s` to end, then drop them."""
        if self._server is not None:
            await self._server.stop(timeout_s)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_passed_on, path = _restore_client(scope), scope["path"]  # clients may ask no private route
        route = None if is_passed_on or not path.startswith(_PRIVATE) else self._routes.get(path.removeprefix(_PRIVATE))
        if route is not None:
            answer = msgspec.msgpack.encode(await route(await _read_body(receive)))
            length = str(len(answer)).encode()
            await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", length)]})
            await send({"type": "http.response.body", "body": answer})
        elif self._app is not None:
            await self._app(scope, receive, send)


async def _read_body(receive: Receive) -> bytes:
    body, has_more = b"", True
    while has_more:
        message = await receive()
        body, has_more = body + message.get("body", b""), message.get("more_body", False)
    return body


def _restore_client(scope: Scope) -> bool:
    """Give a request that was passed on its client, and the headers that this had sent. Returns whether it was."""
    headers: list[tuple[bytes, bytes]] = scope["headers"]
    place = next((place for place, (name, _) in enumerate(headers) if name == _PEER), None)
    if place is None:
        return False
    host, _, port = headers[place][1].decode().rpartition(" ")
    scope["client"] = (host, int(port)) if host else None
    scope["headers"] = headers[:place] + headers[place + 1 :]
    del scope["extensions"][NAMES_AS_SENT]["names"][place]
    return True


class Peer:
    """Another process of this server, as its private socket answers. Each request has a connection for its time.

    It is an ASGI application, which passes requests on. Belongs to the event loop.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._idle: list[_Connection] = []

    async def ask(self, route: str, question: object, answer: type[T]) -> T:
        """Return the answer of a private route. Raises OSError where the other process is away or cannot answer."""
        body = msgspec.msgpack.encode(question)
        head = b"POST %b%b HTTP/1.1\r\nhost: localhost\r\ncontent-length: %d\r\n\r\n"
        connection = await self._open()
        is_whole = False
        try:
            connection.writer.write(head % (_PRIVATE.encode(), route.encode(), len(body)) + body)
            pieces = []
            while (piece := await connection.read()) is not None:
                pieces.append(piece)
            is_whole = True
        finally:
            self._give_back(connection, is_whole=is_whole)
        if connection.status != 200:
            raise ConnectionError(f"the other process answered {route} with {connection.status}")
        return msgspec.msgpack.decode(b"".join(pieces), type=answer)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on. Raises ConnectionError where the other process is lost after the answer's head, so that
        nothing looks complete."""
        try:
            connection = await self._open()
        except OSError:
            await _refuse(scope, receive, send)
            return
        upgrade: Upgrade | None = scope.get("extensions", {}).get(UPGRADE)
        if upgrade is not None:
            upgrade.protocol = Relay(upgrade, connection)
        passage = _Passage(connection, scope, receive)
        sending = asyncio.create_task(passage.send_request())
        try:
            await passage.pass_answer(send)
            if upgrade is not None and connection.status == SWITCHING:
                sending.cancel()
                await cast(Relay, upgrade.protocol).run()
        finally:
            sending.cancel()
            self._give_back(connection, is_whole=passage.is_complete)

    async def _open(self) -> "_Connection":
        while self._idle:
            idle = self._idle.pop()
            if idle.is_usable:
                idle.begin()
                return idle
            idle.writer.close()
        return _Connection(*await asyncio.open_unix_connection(str(self._path)))

    def _give_back(self, connection: "_Connection", *, is_whole: bool) -> None:
        if is_whole and connection.may_stay and len(self._idle) < _MOST_IDLE:
            connection.idle_since = monotonic()
            self._idle.append(connection)
        else:
            connection.writer.close()

    def close(self) -> None:
        """Close the connections that no request uses."""
        for each in self._idle:
            each.writer.close()
        self._idle.clear()


class _Connection:
    """A connection to another process, with the answer that comes on it. httptools calls its `on_...` methods."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.writer = writer
        self.reader = reader
        self.idle_since = 0.0
        self._parser = httptools.HttpResponseParser(self)
        self.begin()

    def begin(self) -> None:
        """Expect another answer."""
        self.status = 0
        self.rest = b""
        """What has come behind an answer that changes the protocol."""
        self.headers: list[tuple[bytes, bytes]] = []
        self.may_stay = False
        """Whether the connection may have another request."""
        self._pieces: deque[bytes] = deque()
        self._is_complete = False

    @property
    def is_usable(self) -> bool:
        return monotonic() - self.idle_since < _IDLE_S and not self.reader.at_eof() and not self.writer.is_closing()

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        self.status = self._parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        self._pieces.append(body)

    def on_message_complete(self) -> None:
        self._is_complete = True
        self.may_stay = self._parser.should_keep_alive() and self.status != SWITCHING

    async def read_head(self) -> None:
        """Wait for status and headers. Raises ConnectionError."""
        while not self.status:
            await self._advance()

    async def read(self) -> bytes | None:
        """Return the next piece of the body, None at its end. Raises ConnectionError where it is cut."""
        while not self._pieces:
            if self._is_complete:
                return None
            await self._advance()
        return self._pieces.popleft()

    @property
    def has_read_all(self) -> bool:
        return self._is_complete and not self._pieces

    async def _advance(self) -> None:
        data = await self.reader.read(_READ_BYTES)
        if not data:
            raise ConnectionError("the other process has closed the connection")
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade as switch:
            self.rest = data[switch.args[0] :]
        except httptools.HttpParserError as error:
            raise ConnectionError(f"the other process does not speak HTTP: {error}") from None


class Relay(asyncio.StreamReaderProtocol):
    """A client's connection that has changed its protocol, whose bytes go to another process and come from there.

    A side that reads slowly slows the other down, and the end of one ends the other.
    """

    def __init__(self, upgrade: Upgrade, peer: _Connection) -> None:
        self._loop = asyncio.get_running_loop()
        self._reader = asyncio.StreamReader(loop=self._loop)
        super().__init__(self._reader, loop=self._loop)
        self._connections = upgrade.connections
        self._peer = peer
        self._idle_since = self._loop.time()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._connections.add(self)
        self._writer = asyncio.StreamWriter(cast(asyncio.WriteTransport, transport), self, self._reader, self._loop)

    def connection_lost(self, exc: Exception | None) -> None:
        self._connections.discard(self)
        super().connection_lost(exc)

    async def run(self) -> None:
        """Pass bytes on until one side ends."""
        peer = self._peer
        self._writer.write(peer.rest)
        work = [
            asyncio.ensure_future(self._pass(self._reader, peer.writer)),
            asyncio.ensure_future(self._pass(peer.reader, self._writer)),
        ]
        try:
            await asyncio.wait(work, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for each in work:
                each.cancel()
            self._writer.close()

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while piece := await reader.read(_READ_BYTES):
                if len(piece) > _PING_BYTES:
                    self._idle_since = self._loop.time()
                writer.write(piece)
                await writer.drain()

    def shutdown(self) -> None:
        """Go on: the other process, which knows what is open, ends the connection where the server ends."""

    def end_when_idle(self, idle_s: float, began_at: float) -> None:
        """Close where nothing was passed on for `idle_s`, counted from `began_at` of the loop's time."""
        if self._loop.time() - max(began_at, self._idle_since) >= idle_s:
            self._writer.close()


class _Passage:
    """One request that is passed on."""

    def __init__(self, connection: _Connection, scope: Scope, receive: Receive) -> None:
        self._connection = connection
        self._scope = scope
        self._receive = receive
        self._has_sent_all = False
        self._is_abandoned = False

    @property
    def is_complete(self) -> bool:
        """Whether all of the request has gone, and all of the answer has come."""
        return self._has_sent_all and self._connection.has_read_all

    async def send_request(self) -> None:
        """Send head and body, and then the client's disconnect, which closes the connection."""
        writer, scope = self._connection.writer, self._scope
        names = [name for name, _ in scope["headers"]]
        is_chunked, has_body = b"content-length" not in names, b"transfer-encoding" in names
        writer.write(_head(scope, is_chunked=is_chunked and has_body))
        has_body |= not is_chunked
        with suppress(OSError):  # the answer may have come before it has read all
            while (message := await self._receive())["type"] != "http.disconnect":
                body, is_last = message.get("body", b""), not message.get("more_body", False)
                if has_body and is_chunked:
                    body = (b"%x\r\n%b\r\n" % (len(body), body) if body else b"") + (b"0\r\n\r\n" if is_last else b"")
                if has_body and body:
                    writer.write(body)
                    await writer.drain()
                self._has_sent_all = is_last
            if not self._connection.has_read_all:
                self._is_abandoned = True
                writer.transport.abort()

    async def pass_answer(self, send: Send) -> None:
        """Pass the answer to the client. Raises ConnectionError where it is cut."""
        connection, scope = self._connection, self._scope
        try:
            await connection.read_head()
            kept = [each for each in connection.headers if each[0] not in _ANSWER_HOP_HEADERS]
            await send({"type": "http.response.start", "status": connection.status, "headers": kept})
            if scope["method"] == "HEAD":  # the parser would wait for the body whose length the head says
                await send({"type": "http.response.body", "body": b"", "more_body": False})
                return
            while (piece := await connection.read()) is not None:
                await send(_piece(piece, is_last=connection.has_read_all))
                if connection.has_read_all:
                    return
            await send(_piece(b"", is_last=True))
        except ConnectionError:
            if self._is_abandoned:
                return
            if connection.status:
                raise
            await _refuse(scope, self._receive, send)


def _piece(body: bytes, *, is_last: bool) -> Message:
    return {"type": "http.response.body", "body": body, "more_body": not is_last}


def _head(scope: Scope, *, is_chunked: bool) -> bytes:
    """Return the head of a request as its client sent it, with the client's address."""
    headers = scope["headers"]
    names = scope.get("extensions", {}).get(NAMES_AS_SENT, {}).get("names") or [name for name, _ in headers]
    dropped = _HOP_HEADERS - _SWITCHING_HEADERS if UPGRADE in scope.get("extensions", {}) else _HOP_HEADERS
    query, client = scope["query_string"], scope.get("client")
    lines = [b"%b %b%b HTTP/1.1" % (scope["method"].encode(), scope["raw_path"], b"?" + query if query else b"")]
    lines += [
        b"%b: %b" % (sent, value) for sent, (name, value) in zip(names, headers, strict=True) if name not in dropped
    ]
    if all(name != b"host" for name, _ in headers):  # HTTP/1.0 needs none
        lines.append(b"host: localhost")
    lines.append(b"%b: %b" % (_PEER, "{} {}".format(*client or ("", 0)).encode()))
    if is_chunked:
        lines.append(b"transfer-encoding: chunked")
    return b"\r\n".join((*lines, b"", b""))


async def _refuse(scope: Scope, receive: Receive, send: Send) -> None:
    """Answer in the place of a process that is away."""
    error = SluiceError(ErrorCode.UNAVAILABLE, "the server's host process is away; try again in a moment")
    response = error_response(scope["path"], error)
    response.headers["x-request-id"] = choose_request_id(scope["headers"])
    await response(scope, receive, send)
