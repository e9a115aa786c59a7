"""Requests that a worker passes on to the host, as ASGI's messages over a connection for each request at a time."""

import asyncio
from typing import Any

import msgspec
from starlette.types import Receive, Scope, Send

from sluice.errors import ErrorCode, SluiceError
from sluice.gateway.front.http.errors import error_response
from sluice.gateway.front.http.protocol import NAMES_AS_SENT
from sluice.gateway.front.http.request import choose_request_id
from sluice.gateway.workers.messages import Begin, OfAnswer, Piece, Start
from sluice.gateway.workers.wire import Wire

_MOST_IDLE = 64
_DECODER = msgspec.msgpack.Decoder(OfAnswer)


class HostApplication:
    """The host's application, as an ASGI application of the worker. Belongs to the event loop."""

    def __init__(self, socket: str) -> None:
        """`socket` is the path of the host's socket for requests."""
        self._socket = socket
        self._idle: list[Wire[OfAnswer]] = []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            wire = await self._open()
        except OSError:
            await _refuse(scope, receive, send)
            return
        wire.send(_begin(scope))
        request = _ForwardedRequest(wire, receive)
        sending = asyncio.create_task(request.send_body())
        try:
            await request.pass_answer(scope, send)
        finally:
            sending.cancel()
            if request.is_complete and not wire.is_closed and len(self._idle) < _MOST_IDLE:
                self._idle.append(wire)
            else:
                wire.close()

    async def _open(self) -> Wire[OfAnswer]:
        while self._idle:
            wire = self._idle.pop()
            if not wire.is_closed:
                return wire
        loop = asyncio.get_running_loop()
        _, opened = await loop.create_unix_connection(lambda: Wire[OfAnswer](_DECODER), self._socket)
        return opened

    def close(self) -> None:
        """Close the connections that no request uses."""
        for wire in self._idle:
            wire.close()
        self._idle.clear()


class _ForwardedRequest:
    """One request on a connection to the host."""

    def __init__(self, wire: Wire[OfAnswer], receive: Receive) -> None:
        self._wire = wire
        self._receive = receive
        self._has_sent_body = False
        self._has_answer = False
        self._is_abandoned = False

    @property
    def is_complete(self) -> bool:
        """Whether all of the request has gone, and all of the answer has come."""
        return self._has_sent_body and self._has_answer

    async def send_body(self) -> None:
        """Pass the body on, and then the client's disconnect, which closes the connection."""
        while True:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                if not self._has_answer:
                    self._is_abandoned = True
                    self._wire.close()
                return
            is_last = not message.get("more_body", False)
            await self._wire.write(Piece(message.get("body", b""), is_last))
            self._has_sent_body = is_last

    async def pass_answer(self, scope: Scope, send: Send) -> None:
        """Pass the answer to the client. Raises ConnectionError where the host is lost after the answer's head, so that
        nothing looks complete."""
        has_begun = False
        while not self._has_answer:
            match await self._wire.read():
                case Start(status, headers):
                    await send({"type": "http.response.start", "status": status, "headers": headers})
                    has_begun = True
                case Piece(body, is_last):
                    self._has_answer = is_last
                    await send({"type": "http.response.body", "body": body, "more_body": not is_last})
                case None if self._is_abandoned:
                    return
                case None if has_begun:
                    raise ConnectionError("the host process was lost while it answered")
                case None:
                    await _refuse(scope, self._receive, send)
                    return


def _begin(scope: Scope) -> Begin:
    extension: dict[str, Any] = scope.get("extensions", {}).get(NAMES_AS_SENT, {})
    client = scope.get("client")
    return Begin(
        method=scope["method"],
        path=scope["path"],
        raw_path=scope["raw_path"],
        query=scope["query_string"],
        http_version=scope["http_version"],
        headers=scope["headers"],
        names=extension.get("names", []),
        client=None if client is None else (client[0], client[1]),
    )


async def _refuse(scope: Scope, receive: Receive, send: Send) -> None:
    """Answer in the host's place."""
    error = SluiceError(ErrorCode.UNAVAILABLE, "the server's host process is away; try again in a moment")
    response = error_response(scope["path"], error)
    response.headers["x-request-id"] = choose_request_id(scope["headers"])
    await response(scope, receive, send)
