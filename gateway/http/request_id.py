"""Gives every request an id, counts its answer, and is where an unexpected failure becomes a 500."""

import itertools
import re
import secrets
from collections.abc import Callable

from starlette.requests import HTTPConnection
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gateway.http.errors import as_sluice_error, error_response
from gateway.telemetry.logs import current_request_id

_REPEATABLE = re.compile(r"[A-Za-z0-9._:/+=@-]{1,128}", re.ASCII)

_HEADER = b"x-request-id"
_OURS = secrets.token_hex(7)
_NUMBERS = itertools.count(secrets.randbits(32))
"""Ids are numbers behind this process's own mark: a random one for each request costs more than parsing its head."""

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
        request_id = _sent_id(scope) or f"{_OURS}{next(_NUMBERS):010x}"
        scope.setdefault("state", {})["request_id"] = request_id
        current_request_id.set(request_id)
        await self._serve(scope, receive, send, request_id)

    async def _serve(self, scope: Scope, receive: Receive, send: Send, request_id: str) -> None:
        header = (_HEADER, request_id.encode("ascii"))
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


def _sent_id(scope: Scope) -> str | None:
    """The client's id where it is safe to repeat in a header and a log line."""
    for name, value in scope["headers"]:
        if name == _HEADER:
            sent = value.decode("latin-1")
            return sent if _REPEATABLE.fullmatch(sent) else None
    return None
