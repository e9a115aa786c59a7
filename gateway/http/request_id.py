"""Gives every request an id, counts its answer, and is where an unexpected failure becomes a 500."""

import re
import secrets
from collections.abc import Callable

from starlette.datastructures import Headers
from starlette.requests import HTTPConnection
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gateway.http.errors import as_sluice_error, error_response
from gateway.telemetry.logs import current_request_id

_REPEATABLE = re.compile(r"[A-Za-z0-9._:/+=@-]{1,128}", re.ASCII)

CountResponse = Callable[[str, int], None]
"""Told the path and the status of every answer."""


def request_id_of(request: HTTPConnection) -> str:
    """The id that the middleware gave to `request`."""
    request_id: str = request.scope["state"]["request_id"]
    return request_id


class RequestIdMiddleware:
    """Takes the client's `x-request-id` or makes one, and sends it back with the answer.

    Outermost of ours, it also answers exceptions that nobody expected: Starlette's own place for
    that would log each trace twice.
    """

    def __init__(self, app: ASGIApp, count_response: CountResponse) -> None:
        self._app = app
        self._count_response = count_response

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = _repeatable(Headers(scope=scope).get("x-request-id")) or secrets.token_hex(12)
        scope.setdefault("state", {})["request_id"] = request_id
        current_request_id.set(request_id)
        await self._serve(scope, receive, send, request_id)

    async def _serve(self, scope: Scope, receive: Receive, send: Send, request_id: str) -> None:
        header = (b"x-request-id", request_id.encode("ascii"))
        has_started = False

        async def send_with_id(message: Message) -> None:
            nonlocal has_started
            if not has_started:
                has_started = True
                message["headers"] = [*message.get("headers", ()), header]
                self._count_response(scope["path"], message["status"])
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        except Exception as error:
            if has_started:
                raise  # the server closes the connection, so that nothing looks complete
            response = error_response(scope["path"], as_sluice_error(error, request_id))
            await response(scope, receive, send_with_id)


def _repeatable(header: str | None) -> str | None:
    """The client's id where it is safe to repeat in a header and a log line."""
    return header if header is not None and _REPEATABLE.fullmatch(header) else None
