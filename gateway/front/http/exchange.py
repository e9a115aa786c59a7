"""One request: what the guard notes of it, and how it is answered. On a connection it needs no ASGI cycle, no messages
and no task.

The protocol makes a `ConnectionExchange` for each plain request whose path the server's `HotRoutes` take. A request
that is framed in another way comes over ASGI, as an exchange of its own kind, and gets the same answer.
"""

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from sluice.gateway.calls import Call
from sluice.gateway.front.http.errors import CLIENT_CLOSED_REQUEST
from sluice.gateway.telemetry.tracer import finish_root
from sluice.record.spans import Span
from sluice.record.timelines import RECEIVED
from sluice.serving.tensors.tensor import Buffer

log = logging.getLogger(__name__)
JSON = b"application/json"
PIECE_BYTES = 1 << 20
"""Bytes of a body that are written at once."""
_ID_HEADER = b"x-request-id"
_CLOSING = (b"connection", b"close")
Headers = Iterable[tuple[bytes, bytes]]
HOT_ENDING = b"/infer"
"""The end of every path that hot routes have."""
RawHeaders = Sequence[tuple[bytes, bytes]]
CountResponse = Callable[[str, int], None]
"""Receives the path and the status of every answer."""

_FIRST_ERROR = 500


def _finish(root: Span, status: int | None, call: Call | None) -> None:
    """End the recording of a request with its status, None where its client got none."""
    if call is not None:
        if call.tenant:
            root.attributes["sluice.tenant"] = call.tenant
        if call.identity is not None:
            root.attributes["sluice.key"] = call.identity.name
    if status is not None:
        root.attributes["http.response.status_code"] = status
    finish_root(root, status, is_failure=status is not None and status >= _FIRST_ERROR)


class Passage:
    """A request with its recording and its call, as far as there are."""

    __slots__ = ("call", "headers", "method", "path", "peer", "request_id", "root", "status")

    def __init__(self, method: str, path: str, headers: RawHeaders, peer: str, request_id: str) -> None:
        self.method = method
        self.path = path
        self.headers = headers
        self.peer = peer
        self.request_id = request_id
        self.call: Call | None = None
        self.root: Span | None = None
        self.status: int | None = None

    def receive(self, piece: bytes, *, is_last: bool) -> None:
        """Note a piece of the body."""
        if self.root is not None and is_last:
            self.root.note(RECEIVED)
        if self.call is not None:
            self.call.note_received(piece)

    def start(self, status: int) -> Iterable[tuple[bytes, bytes]]:
        """Note the beginning of the answer. Returns more headers of it."""
        self.status = status
        if self.root is not None:
            self.root.note("response_start")
        if self.call is None:
            return ()
        self.call.status = status
        return self.call.answer_headers()

    def send(self, piece: bytes) -> None:
        """Note a piece of the answer."""
        if self.call is not None:
            self.call.note_sent(piece)

    def end(self) -> None:
        """End the recording and the call. Idempotent."""
        root, call, self.root, self.call = self.root, self.call, None, None
        if root is not None:
            _finish(root, self.status, call)
        if call is not None:
            call.release()


class Exchange(ABC):
    """A request, and the means to answer it once. Event loop only.

    `headers` is by lower-case name; of equal names the last counts. `names` are the headers' names as they were sent.
    """

    __slots__ = ("body", "has_started", "headers", "is_gone", "names", "on_gone", "path", "raw_headers", "request_id")

    def __init__(self, path: str, raw_headers: RawHeaders, names: Sequence[bytes], body: bytes | None) -> None:
        """`body` is the whole body; None: it is still to be read."""
        self.path = path
        self.raw_headers = raw_headers
        self.names = names
        self.headers: dict[bytes, bytes] = dict(raw_headers)
        self.body = body
        self.request_id = "-"
        """As in the log; "-" where requests have none."""
        self.has_started = False
        """Whether the answer has begun."""
        self.is_gone = False
        """Whether the client is gone."""
        self.on_gone: Callable[[], None] | None = None
        """Called where the client is gone before the answer."""

    def header(self, name: bytes) -> str:
        """Return a header's text; "" where it is absent."""
        value = self.headers.get(name)
        return value.decode("latin-1") if value is not None else ""

    @abstractmethod
    def answer(self, status: int, body: bytes, content_type: bytes = JSON, more: Headers = ()) -> None:
        """Send the whole answer, which is short. Does nothing where the client is gone."""

    @abstractmethod
    async def reply_pieces(
        self, status: int, pieces: Sequence[Buffer], content_type: bytes = JSON, more: Headers = ()
    ) -> None:
        """Send an answer of any length, as fast as the client reads it."""

    @abstractmethod
    def go_on(self, work: Coroutine[Any, Any, None]) -> None:
        """Let `work`, which takes long, send the answer. It must not raise before the answer has begun."""


class ConnectionExchange(Exchange):
    """An exchange whose body is complete, on a connection of its own."""

    __slots__ = ("_connection", "_end", "count_response", "keep_alive", "passage")

    def __init__(
        self,
        connection: HttpToolsProtocol,
        url: bytes,
        raw_headers: RawHeaders,
        names: Sequence[bytes],
        body: bytes,
        end: Callable[[], None],
    ) -> None:
        """`end` is called when the answer is complete: it may close the connection, or begin the next request."""
        super().__init__(url.decode("ascii"), raw_headers, names, body)
        self._connection = connection
        self._end = end
        self.keep_alive = True
        self.count_response: CountResponse | None = None
        self.passage: Passage | None = None
        """Where it is noted; None where nobody observes it."""

    @property
    def peer(self) -> str:
        """The client's address; "" where it has none."""
        client = self._connection.client
        return client[0] if client else ""

    def leave(self) -> None:
        """Note that the client is gone."""
        self.is_gone = True
        cancel, self.on_gone = self.on_gone, None
        if not self.has_started:
            self.has_started = True
            if self.count_response is not None:
                self.count_response(self.path, CLIENT_CLOSED_REQUEST)
            if self.passage is not None:
                self.passage.start(CLIENT_CLOSED_REQUEST)
        if cancel is not None:
            cancel()
        if self.passage is not None:
            self.passage.end()

    def answer(self, status: int, body: bytes, content_type: bytes = JSON, more: Headers = ()) -> None:
        if self.has_started:
            return
        self._write(self._start(status, len(body), content_type, more) + body)
        if self.passage is not None:
            self.passage.send(body)
        self._finish()

    async def reply_pieces(
        self, status: int, pieces: Sequence[Buffer], content_type: bytes = JSON, more: Headers = ()
    ) -> None:
        if self.has_started:
            return
        flow = self._connection.flow
        head = self._start(status, sum(map(len, pieces)), content_type, more)
        for piece in pieces:
            for start in range(0, len(piece), PIECE_BYTES):
                part = bytes(piece[start : start + PIECE_BYTES])
                if flow.write_paused:
                    await flow.drain()
                if self.is_gone:
                    return
                self._write(head + part)
                head = b""
                if self.passage is not None:
                    self.passage.send(part)
        self._write(head)
        self._finish()

    def go_on(self, work: Coroutine[Any, Any, None]) -> None:
        connection = self._connection
        task = connection.loop.create_task(work)
        task.add_done_callback(self._finish_work)
        connection.tasks.add(task)

    def _finish_work(self, task: "asyncio.Task[None]") -> None:
        self._connection.tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None:
            log.error("request %s failed while it was answered", self.request_id, exc_info=error)
        if (error is not None or task.cancelled()) and not self.is_gone:
            self._connection.transport.close()  # so that nothing looks complete

    def _start(self, status: int, length: int, content_type: bytes, more: Headers) -> bytes:
        """Return the head of the answer, which is about to be written."""
        self.has_started = True
        self.on_gone = None
        self.body = None  # the connection may stay open
        if self.count_response is not None:
            self.count_response(self.path, status)
        pieces = [STATUS_LINE[status]]
        for name, value in self._connection.server_state.default_headers:
            pieces.append(b"%b: %b\r\n" % (name, value))
        pieces.append(b"content-type: %b\r\ncontent-length: %d\r\n" % (content_type, length))
        if self.passage is not None:
            more = (*more, *self.passage.start(status))
        for name, value in more:
            pieces.append(b"%b: %b\r\n" % (name, value))
        if self.request_id != "-":
            pieces.append(b"%b: %b\r\n" % (_ID_HEADER, self.request_id.encode("ascii")))
        if more and _CLOSING in more:
            self.keep_alive = False
        elif not self.keep_alive:
            pieces.append(b"connection: close\r\n")
        pieces.append(b"\r\n")
        return b"".join(pieces)

    def _write(self, data: bytes) -> None:
        transport = self._connection.transport
        if data and not transport.is_closing():
            transport.write(data)

    def _finish(self) -> None:
        if not self.keep_alive:
            self._connection.transport.close()
        if self.passage is not None:
            self.passage.end()
        self._end()


@dataclass(frozen=True, slots=True)
class HotRoutes:
    """Answers requests on their connections."""

    takes: Callable[[bytes, RawHeaders], bool]
    """Whether POST requests to a URL, which ends in HOT_ENDING, are answered so. It must be fast."""
    begin: Callable[[ConnectionExchange], None]
    """Answers now or later. Must not raise."""
