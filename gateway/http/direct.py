"""Requests that are answered on their connection itself, without an ASGI cycle and a task.

A cycle, its task, its messages and the layers of an application cost more than a small inference. The server offers
plain requests to the application first (`Direct`); what that declines goes to it whole, as every other request does.
"""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, Protocol, runtime_checkable

from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, RequestResponseCycle

from sluice.gateway.calls import CallLog
from sluice.gateway.http.access import PageGuard
from sluice.gateway.http.errors import CLIENT_CLOSED_REQUEST
from sluice.gateway.http.request import CountResponse, RequestIdMiddleware, choose_request_id
from sluice.gateway.telemetry.logs import current_request_id

CLOSING = (b"connection", b"close")
_ID_HEADER = b"x-request-id"
RawHeaders = Sequence[tuple[bytes, bytes]]


class Connection(Protocol):
    """The connection of a request, as uvicorn's protocol has it."""

    client: Any
    cycle: Any
    flow: Any
    loop: Any
    logger: Any
    access_logger: Any
    server_state: Any
    transport: Any
    tasks: Any

    def on_response_complete(self) -> None: ...


class DirectExchange:
    """One request whose body is complete, and the means to answer it once. Event loop only.

    It stands where uvicorn has a cycle, and has those of its attributes that the protocol reads.
    """

    __slots__ = (
        "_connection",
        "body",
        "count_response",
        "disconnected",
        "headers",
        "keep_alive",
        "on_disconnect",
        "raw_headers",
        "request_id",
        "response_complete",
        "response_started",
        "url",
    )

    more_body = False

    def __init__(self, connection: Connection, url: bytes, raw_headers: RawHeaders, body: bytes) -> None:
        self._connection = connection
        self.url = url
        self.raw_headers = raw_headers
        self.headers: dict[bytes, bytes] = dict(raw_headers)
        """By lower-case name; of equal names the last counts."""
        self.body = body
        self.request_id = ""
        """Sent back with the answer; "" where requests have none."""
        self.count_response: CountResponse | None = None
        self.on_disconnect: Callable[[], None] | None = None
        """Called where the client is gone before the answer."""
        self.keep_alive = True
        self.disconnected = False
        self.response_started = False
        self.response_complete = False

    @property
    def peer(self) -> str:
        """The client's address; "" where it has none."""
        client = self._connection.client
        return client[0] if client else ""

    @property
    def path(self) -> str:
        return self.url.decode("ascii")

    @property
    def message_event(self) -> "DirectExchange":
        """What the protocol sets when a client has disconnected."""
        return self

    def set(self) -> None:
        """Note that the client may be gone."""
        if not self.disconnected or self.response_started:
            return
        self.response_started = self.response_complete = True
        self._count(CLIENT_CLOSED_REQUEST)
        cancel = self._let_go()
        if cancel is not None:
            cancel()

    def reply(self, status: int, body: bytes, content_type: bytes, more: RawHeaders = ()) -> None:
        """Write the whole answer. Does nothing where the client is gone."""
        if self.response_started:
            return
        self.response_started = self.response_complete = True
        self._let_go()
        self._count(status)
        connection = self._connection
        transport = connection.transport
        if not transport.is_closing():
            transport.write_whole(self._head(status, len(body), content_type, more) + body)
            if not self.keep_alive:
                transport.close()
        connection.on_response_complete()

    def _head(self, status: int, length: int, content_type: bytes, more: RawHeaders) -> bytes:
        pieces = [STATUS_LINE[status]]
        for name, value in self._connection.server_state.default_headers:
            pieces.append(b"%b: %b\r\n" % (name, value))
        pieces.append(b"content-type: %b\r\ncontent-length: %d\r\n" % (content_type, length))
        for name, value in more:
            pieces.append(b"%b: %b\r\n" % (name, value))
        if self.request_id:
            pieces.append(b"%b: %b\r\n" % (_ID_HEADER, self.request_id.encode("ascii")))
        if CLOSING in more:
            self.keep_alive = False
        elif not self.keep_alive:
            pieces.append(b"connection: close\r\n")
        pieces.append(b"\r\n")
        return b"".join(pieces)

    def go_on(self, answer: ASGIApp) -> None:
        """Answer by an application in a task, which takes the request's place: what follows takes long."""
        if self.response_started:
            return
        self.response_started = True
        self._let_go()
        connection = self._connection
        state = {"request_id": self.request_id or "-"}
        scope = {"type": "http", "method": "POST", "path": self.path, "headers": self.raw_headers, "state": state}
        cycle = RequestResponseCycle(
            scope=scope,  # type: ignore[arg-type]
            transport=connection.transport,
            flow=connection.flow,
            logger=connection.logger,
            access_logger=connection.access_logger,
            access_log=False,
            default_headers=connection.server_state.default_headers,
            message_event=asyncio.Event(),
            expect_100_continue=False,
            keep_alive=self.keep_alive,
            on_response=connection.on_response_complete,
        )
        cycle.more_body = False
        if connection.cycle is self:
            connection.cycle = cycle
        else:  # the next request on the connection stands there
            self.response_complete = True
        task = connection.loop.create_task(cycle.run_asgi(self._with_id(answer)))  # type: ignore[arg-type]
        task.add_done_callback(connection.tasks.discard)
        connection.tasks.add(task)

    def _let_go(self) -> Callable[[], None] | None:
        """Hold the request no longer: its connection may stay open. Returns what was to be called at a disconnect."""
        cancel, self.on_disconnect = self.on_disconnect, None
        self.body = b""
        return cancel

    def _with_id(self, answer: ASGIApp) -> ASGIApp:
        request_id, count = self.request_id, self.count_response
        if not request_id or count is None:
            return answer
        middleware = RequestIdMiddleware(answer, count)

        async def serve(scope: Scope, receive: Receive, send: Send) -> None:
            current_request_id.set(request_id)
            await middleware.serve(scope, receive, send, request_id)

        return serve

    def _count(self, status: int) -> None:
        if self.count_response is not None:
            self.count_response(self.path, status)


class Direct(Protocol):
    """What answers requests directly."""

    def takes(self, url: bytes) -> bool:
        """Whether POST requests to `url` may be answered directly. Called with every request: it must be fast."""
        ...

    def begin(self, exchange: DirectExchange) -> bool:
        """Answer now or later; False, with nothing done, where the request needs the application. Must not raise."""
        ...


@runtime_checkable
class DirectApp(Protocol):
    """An application that answers some requests directly; `direct` None: none."""

    @property
    def direct(self) -> Direct | None: ...


def find_direct(app: object) -> Direct | None:
    """Return what answers requests to `app` directly; None where everything is to pass the application."""
    return app.direct if isinstance(app, DirectApp) else None


class GuardedDirect:
    """Gives direct requests their id and counts their answers, as the guards of the application do.

    Declines while calls are observed: they have a context and an end of their own; and what pages may not ask.
    """

    def __init__(
        self, direct: Direct, calls: CallLog, count_response: CountResponse, pages: PageGuard | None = None
    ) -> None:
        self._calls = calls
        self._pages = pages or PageGuard(calls)
        self._begin = direct.begin
        self._count_response = count_response
        self.takes = direct.takes

    def begin(self, exchange: DirectExchange) -> bool:
        """Answer like `Direct.begin`."""
        if self._calls.is_active or self._pages.find_refusal("POST", exchange.headers, exchange.peer) is not None:
            return False
        exchange.request_id = choose_request_id(exchange.raw_headers)
        exchange.count_response = self._count_response
        before = current_request_id.set(exchange.request_id)
        try:
            return self._begin(exchange)
        finally:
            current_request_id.reset(before)
