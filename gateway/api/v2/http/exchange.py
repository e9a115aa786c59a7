"""One request and its answer, straight over ASGI: what its path names, replies, and errors in Triton's statuses."""

import asyncio
from collections.abc import Coroutine, Sequence
from operator import itemgetter
from typing import Any, NamedTuple

import orjson
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from sluice.errors import ErrorCode, SluiceError
from sluice.gateway.api.v2.server import parse_version
from sluice.gateway.front.http.errors import HTTP_STATUS, as_sluice_error, error_headers
from sluice.gateway.front.http.exchange import JSON, PIECE_BYTES, Exchange, Headers
from sluice.gateway.front.http.passage import RawHeaders
from sluice.gateway.front.http.protocol import NAMES_AS_SENT
from sluice.gateway.front.path_masking import client_message
from sluice.serving.tensors.tensor import Buffer

BINARY = b"application/octet-stream"
EVENTS = b"text/event-stream; charset=utf-8"
_TRITON_STATUS = dict.fromkeys(
    (ErrorCode.ALREADY_EXISTS, ErrorCode.CANCELLED, ErrorCode.TOO_LARGE, ErrorCode.UNKNOWN), 400
)
"""Statuses where Triton differs from the other protocols. Codes that Triton lacks keep theirs."""
V2_STATUS: dict[ErrorCode, int] = {**HTTP_STATUS, **_TRITON_STATUS}
_UNWATCHED_S = 0.02
"""Seconds before an answer's client is watched: for a shorter answer that costs more than it saves."""
_MAX_VERSION_DIGITS = 4000
"""Digits of a version that are read and repeated in an error: Python refuses to read more than 4300."""


class RequestTarget(NamedTuple):
    """The model and version, or the shared memory region, that a path names, as it spells them. "" where absent."""

    name: str = ""
    version: str = ""

    @property
    def version_number(self) -> int:
        """The version; LATEST where none is named. Raises INVALID for one that exceeds 64 bits."""
        return parse_version(self.version[:_MAX_VERSION_DIGITS])


class AsgiExchange(Exchange):
    """A request that came over ASGI, and the means to answer it: at once, or in pieces."""

    __slots__ = ("_answer", "method", "receive", "scope", "send")

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        names = scope.get("extensions", {}).get(NAMES_AS_SENT)
        raw_headers: RawHeaders = scope["headers"]
        super().__init__(
            scope["path"], raw_headers, names["names"] if names else [*map(itemgetter(0), raw_headers)], None
        )
        self.scope = scope
        self.receive = receive
        self.send = send
        self.method: str = scope["method"]
        self.request_id = scope.get("state", {}).get("request_id", "-")
        self._answer: asyncio.Future[Coroutine[Any, Any, None]] = asyncio.get_running_loop().create_future()

    async def start(self, status: int, content_type: bytes, more: Headers = ()) -> None:
        """Send the head of a response whose pieces follow."""
        self.has_started = True
        headers = [(b"content-type", content_type), *more]
        await self.send({"type": "http.response.start", "status": status, "headers": headers})

    async def write(self, piece: bytes) -> None:
        await self.send({"type": "http.response.body", "body": piece, "more_body": True})

    async def end(self) -> None:
        """Send the end of a response that was begun with `start`."""
        await self.send({"type": "http.response.body", "body": b"", "more_body": False})

    async def reply(self, status: int, body: bytes = b"", content_type: bytes = JSON, more: Headers = ()) -> None:
        self.has_started = True
        headers = [(b"content-type", content_type), (b"content-length", b"%d" % len(body)), *more]
        await self.send({"type": "http.response.start", "status": status, "headers": headers})
        await self.send({"type": "http.response.body", "body": body, "more_body": False})

    async def reply_pieces(
        self, status: int, pieces: Sequence[Buffer], content_type: bytes = JSON, more: Headers = ()
    ) -> None:
        if len(pieces) == 1 and isinstance(pieces[0], bytes) and len(pieces[0]) <= PIECE_BYTES:
            await self.reply(status, pieces[0], content_type, more)
            return
        await self.start(status, content_type, ((b"content-length", b"%d" % sum(map(len, pieces))), *more))
        for piece in pieces:
            for start in range(0, len(piece), PIECE_BYTES):
                await self.write(bytes(piece[start : start + PIECE_BYTES]))
        await self.end()

    def answer(self, status: int, body: bytes, content_type: bytes = JSON, more: Headers = ()) -> None:
        self.go_on(self.reply(status, body, content_type, more))

    def go_on(self, work: Coroutine[Any, Any, None]) -> None:
        self.on_gone = None  # it holds the exchange
        if self._answer.done():  # the client is gone
            work.close()
        else:
            self._answer.set_result(work)

    async def wait(self) -> None:
        """Wait for the answer, and send it. The body must have been read. Raises ClientDisconnect, after `on_gone`, and
        calls that where it is cancelled, too."""
        loop, answer, watchers = asyncio.get_running_loop(), self._answer, list[asyncio.Task[None]]()
        timer = loop.call_later(_UNWATCHED_S, lambda: watchers.append(loop.create_task(self._watch(answer))))
        try:
            work = await answer
        except (ClientDisconnect, asyncio.CancelledError):
            self.is_gone = True
            if self.on_gone is not None:
                self.on_gone()
            if answer.done() and not answer.cancelled() and answer.exception() is None:
                answer.result().close()
            raise
        finally:
            timer.cancel()
            for each in watchers:
                each.cancel()
        await work

    async def _watch(self, answer: "asyncio.Future[Coroutine[Any, Any, None]]") -> None:
        while (await self.receive())["type"] != "http.disconnect":
            pass
        if not answer.done():
            answer.set_exception(ClientDisconnect())


def refusal_of(exchange: Exchange, error: Exception) -> tuple[int, bytes, Headers]:
    """Return status, body and further headers of the answer to a request that has failed, in Triton's words."""
    refusal = as_sluice_error(error, exchange.request_id)
    # The traceback holds frames that hold the job and its response, which hold the error. Left to the garbage
    # collector, refusals under load would stop everything else for a tenth of a second every other second.
    error.__traceback__ = None
    headers = [(name.encode(), value.encode()) for name, value in error_headers(refusal).items()]
    return V2_STATUS[refusal.code], error_json(refusal), headers


def error_json(error: SluiceError) -> bytes:
    """Return the body for an error. Characters that are no Unicode are replaced."""
    return orjson.dumps({"error": client_message(error).encode("utf-8", "replace").decode()})
