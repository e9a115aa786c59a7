"""Requests whose headers ask for more than an answer: they are answered apart from their connection."""

from http import HTTPStatus

from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from sluice.errors import SluiceError
from sluice.gateway.answers.streams.response import REPLAYED_HEADER, KeptResponse
from sluice.gateway.answers.streams.service import ConflictingKeyError, StreamService
from sluice.gateway.answers.streams.wishes import HEADERS, Wish, read_wish
from sluice.gateway.front.http.content_coding import without_encoding
from sluice.gateway.front.http.errors import CLIENT_CLOSED_REQUEST, error_response
from sluice.gateway.front.http.request import owner_of, read_body
from sluice.gateway.options.http import HttpOptions


class StreamMiddleware:
    """Serves requests that are resumable, come back to a stream, or have an idempotency key; passes on all others."""

    def __init__(self, app: ASGIApp, streams: StreamService, options: HttpOptions) -> None:
        self._app = streams.app = app
        self._streams = streams
        self._options = options

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or HEADERS.isdisjoint([name for name, _ in scope["headers"]]):
            await self._app(scope, receive, send)
            return
        try:
            wish = self._read_wish(scope)
            if wish is None:
                await self._app(scope, receive, send)
                return
            response = await self._open(wish, scope, receive, send)
        except ConflictingKeyError as error:
            response = error_response(scope["path"], error)
            response.status_code = HTTPStatus.UNPROCESSABLE_ENTITY
        except ClientDisconnect:
            response = Response(status_code=CLIENT_CLOSED_REQUEST)
        except SluiceError as error:
            response = error_response(scope["path"], error)
        await response(scope, receive, send)

    def _read_wish(self, scope: Scope) -> Wish | None:
        wish = read_wish(scope)
        if wish is None or self._streams.options.idempotency_s:
            return wish
        return wish._replace(key="") if wish.is_resumable or wish.last_event else None

    async def _open(self, wish: Wish, scope: Scope, receive: Receive, send: Send) -> Response:
        keep_alive_s = self._options.sse_keep_alive_s
        if wish.last_event is not None:
            last = wish.last_event
            kept = await self._streams.find(owner_of(Headers(scope=scope)), last.stream_id, scope)
            return KeptResponse(kept, last.number, keep_alive_s, num_takeovers=last.num_takeovers)
        body = await read_body(Request(scope, receive), self._options.max_input_bytes)
        kept, is_replayed = await self._streams.open(wish, without_encoding(scope), body)
        return KeptResponse(kept, 0, keep_alive_s, [(REPLAYED_HEADER, b"true")] if is_replayed else [])
