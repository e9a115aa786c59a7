"""Kept streams over HTTP: headers that ask for more than an answer, the response to a reader, and the routes."""

from contextlib import aclosing, suppress
from http import HTTPStatus
from typing import Annotated

from fastapi import APIRouter, Query, Request, Response
from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Receive, Scope, Send

from sluice.errors import ErrorCode, SluiceError, invalid
from sluice.gateway.answers.streams.kept import Head, HeaderPairs, KeptStream, StreamMovedError
from sluice.gateway.answers.streams.service import ConflictingKeyError, StreamService
from sluice.gateway.answers.streams.wishes import HEADERS, LAST_EVENT_HEADER, Wish, parse_event_id, read_wish
from sluice.gateway.calls import ending_with_key
from sluice.gateway.front.http.content_coding import without_encoding
from sluice.gateway.front.http.errors import (
    CLIENT_CLOSED_REQUEST,
    anthropic_error_body,
    as_sluice_error,
    error_response,
    is_anthropic,
    openai_error_body,
)
from sluice.gateway.front.http.request import owner_of, read_body, run_while_connected
from sluice.gateway.front.http.sse import EventStreamResponse, SilenceBreaker, find_piece_writer
from sluice.gateway.options.http import HttpOptions

STREAM_HEADER = b"x-sluice-stream"
REPLAYED_HEADER = b"idempotent-replayed"


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


class KeptResponse(Response):
    """Sends a kept stream's status and headers, and its pieces from number `start` on as they come.

    Raises SluiceError where the stream ends before its head, or as `EventLog.check`.
    """

    def __init__(
        self,
        kept: KeptStream,
        start: int,
        keep_alive_s: float,
        headers: HeaderPairs | None = None,
        *,
        num_takeovers: int | None = None,
    ) -> None:
        """The reader has `start` pieces, the last of which was sent after `num_takeovers`; None: that is not known."""
        self.status_code = 200
        self.background = None
        self._kept = kept
        self._start = start
        self._num_takeovers = num_takeovers
        self._keep_alive_s = keep_alive_s
        self._own_headers = headers or []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._kept.reading(), suppress(ClientDisconnect):
            await run_while_connected(receive, self._stream(scope, send))

    async def _stream(self, scope: Scope, send: Send) -> None:
        kept = self._kept
        head = await kept.wait_head()
        if head is None:
            raise kept.failure or SluiceError(ErrorCode.CANCELLED, f"stream {kept.id} was cancelled before its answer")
        start = self._start if head.is_event_stream else 0
        kept.log.check(start, self._num_takeovers)
        await send({"type": "http.response.start", "status": head.status, "headers": self._all_headers(head)})
        await self._write_pieces(start, scope, send, head)

    def _all_headers(self, head: Head) -> HeaderPairs:
        own = [(STREAM_HEADER, self._kept.id.encode())] if self._kept.origin.is_resumable else []
        return [*head.headers, *own, *self._own_headers]

    async def _write_pieces(self, start: int, scope: Scope, send: Send, head: Head) -> None:
        keep_alive_s = self._keep_alive_s if head.is_event_stream else 0.0
        silence = SilenceBreaker(send, EventStreamResponse.keep_alive_frame, keep_alive_s)
        last = b""
        try:
            with ending_with_key():
                await self._follow(start, scope, send, silence)
            if self._kept.failure is not None:
                raise self._kept.failure
        except Exception as error:
            if isinstance(error, StreamMovedError) or not head.is_event_stream:
                return  # the server closes the connection, so that nothing looks complete
            last = error_event(self._kept.origin.path, as_sluice_error(error, scope["state"]["request_id"]))
        finally:
            silence.end()
        await send({"type": "http.response.body", "body": last, "more_body": False})

    async def _follow(self, start: int, scope: Scope, send: Send, silence: SilenceBreaker) -> None:
        write = find_piece_writer(scope, send)
        async with aclosing(self._kept.log.follow(start, self._num_takeovers)) as pieces:
            first = await anext(pieces, b"")  # the server's own writer is for those that follow
            await send({"type": "http.response.body", "body": first, "more_body": True})
            async for piece in pieces:
                await write(piece)
                silence.num_sent += 1


def error_event(path: str, error: SluiceError) -> bytes:
    """Return the last event of a stream that broke, in the shape of the protocol that `path` belongs to."""
    if is_anthropic(path):
        return b"event: error\ndata: " + anthropic_error_body(error) + b"\n\n"
    return b"data: " + openai_error_body(error) + b"\n\n"


def router(streams: StreamService, options: HttpOptions) -> APIRouter:
    """Return the routes under /v1/streams."""
    api = APIRouter(prefix="/v1/streams", tags=["streams"], default_response_class=Response)

    @api.get("/{stream_id}")
    async def read(request: Request, stream_id: str, starting_after: Annotated[int, Query(ge=0)] = 0) -> Response:
        """Return the events of a resumable stream, those after the header Last-Event-ID or `starting_after`; 204 where
        it has ended, and none are left."""
        last_event, num_takeovers = request.headers.get(LAST_EVENT_HEADER), None
        if last_event:
            named, num_takeovers, starting_after = parse_event_id(last_event)
            if named != stream_id:
                raise invalid(LAST_EVENT_HEADER, f"{LAST_EVENT_HEADER} must be of stream {stream_id}, got {last_event}")
        kept = await streams.find(owner_of(request.headers), stream_id, request.scope)
        if kept.has_ended and starting_after == len(kept.log):
            return Response(status_code=HTTPStatus.NO_CONTENT)  # with which EventSource stops coming back
        return KeptResponse(kept, starting_after, options.sse_keep_alive_s, num_takeovers=num_takeovers)

    @api.delete("/{stream_id}")
    async def cancel(request: Request, stream_id: str) -> Response:
        """Cancel a resumable stream: its generation ends, and its events are kept no longer."""
        await streams.cancel(owner_of(request.headers), stream_id, request.scope)
        return Response(status_code=HTTPStatus.NO_CONTENT)

    return api
