"""One request and its answer, straight over ASGI: what its path names; its body, bounded in size and time, and
decompressed; the headers that add to it; replies, and errors in Triton's statuses."""

import asyncio
from collections.abc import Coroutine, Sequence
from operator import itemgetter
from typing import Any, NamedTuple

import orjson
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from sluice.errors import ErrorCode, SluiceError, invalid
from sluice.gateway.api.v2.http.json_document import parse
from sluice.gateway.api.v2.infer import ForwardedHeaders
from sluice.gateway.api.v2.server import parse_version
from sluice.gateway.calls import allowed_priority, current_call, note_session
from sluice.gateway.front.http.content_coding import ENCODING, PackedBody
from sluice.gateway.front.http.errors import (
    HTTP_STATUS,
    UnknownEncodingError,
    as_sluice_error,
    body_too_large,
    error_headers,
)
from sluice.gateway.front.http.exchange import JSON, PIECE_BYTES, Exchange, Headers, RawHeaders
from sluice.gateway.front.http.protocol import NAMES_AS_SENT
from sluice.gateway.front.http.request import next_piece, parse_scheduling
from sluice.gateway.front.long_work import LONG_BYTES, trim_later
from sluice.gateway.front.path_masking import client_message
from sluice.gateway.options.http import RequestOptions
from sluice.gateway.plane.models import STICKY_HEADER as STICKY_TEXT
from sluice.gateway.plane.models import session_header_names
from sluice.serving.request import InferRequest
from sluice.serving.tensors.tensor import Buffer

BINARY = b"application/octet-stream"
EVENTS = b"text/event-stream; charset=utf-8"
JSON_LENGTH_HEADER = b"inference-header-content-length"
STICKY_HEADER = STICKY_TEXT.encode()
"""Name of the header whose equal values get the same version of a model."""
_OWN_PREFIX = b"x-sluice-"
_NOT_ENCODED = ("", "identity")
_MAX_SETTINGS_BYTES = 64 << 10
"""Longest body of settings: it is parsed on the event loop."""
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

    async def end(self, last: bytes = b"") -> None:
        """Send the last piece of a response that has begun."""
        await self.send({"type": "http.response.body", "body": last, "more_body": False})

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


class BodyReader:
    """Reads bodies of up to `limit_bytes`, compressed or not."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._advice = f"{limit_bytes} bytes. Use --http-max-input-size to increase the limit."

    async def read_settings(self, exchange: Exchange, *, is_optional: bool = False) -> object:
        """Return the document of a request that carries settings; {} for an empty body, where it `is_optional`.

        Raises like `read` and `parse`.
        """
        refuse_encoding(exchange)
        body = await self.read(exchange)
        if len(body) > _MAX_SETTINGS_BYTES:
            raise body_too_large(f"is {len(body)} bytes", _MAX_SETTINGS_BYTES, " for settings")
        return parse(body) if body or not is_optional else {}

    async def read(self, exchange: Exchange) -> bytes | bytearray:
        """Return the body as it came.

        Raises TOO_LARGE for a longer one as soon as that is known, DEADLINE where the client stops sending, and
        ClientDisconnect.
        """
        if exchange.body is not None:
            self.check_length(exchange, len(exchange.body))
            return exchange.body
        assert isinstance(exchange, AsgiExchange)
        declared = exchange.headers.get(b"content-length")
        if declared is not None:
            self.check_length(exchange, int(declared))
        body, more = await next_piece(exchange.receive)
        pieces = bytearray(body) if more else body
        while more and len(pieces) <= self._limit_bytes:
            piece, more = await next_piece(exchange.receive)
            pieces += piece
        self.check_length(exchange, len(pieces))
        if len(pieces) >= LONG_BYTES:
            trim_later()
        return pieces

    def check_length(self, exchange: Exchange, num_bytes: int) -> None:
        """Raise TOO_LARGE for a body of so many bytes where that is too many."""
        if num_bytes > self._limit_bytes:
            is_declared = b"content-length" in exchange.headers
            raise self._too_large(exchange, f"{num_bytes}" if is_declared else f"more than {self._limit_bytes}")

    def _too_large(self, exchange: Exchange, size: str) -> SluiceError:
        """Return Triton's error for a body of `size` bytes: it names what of the body is too large."""
        is_raw = exchange.headers.get(JSON_LENGTH_HEADER) == b"0"
        if is_raw:
            text = f"Raw input has a byte_size ({size} bytes) that exceeds the maximum allowed value of {self._advice}"
        else:
            text = f"request JSON size of {size} bytes exceeds the maximum allowed input size of {self._advice}"
        return SluiceError(ErrorCode.TOO_LARGE, text)

    async def read_decoded(self, exchange: Exchange) -> bytes | bytearray:
        """Return the body without its Content-Encoding. Raises UnknownEncodingError, and INVALID for broken data."""
        if ENCODING not in exchange.headers:
            return await self.read(exchange)
        encoding = exchange.header(ENCODING)
        if encoding in _NOT_ENCODED:
            return await self.read(exchange)
        if encoding not in ("gzip", "deflate"):
            raise UnknownEncodingError("Unsupported compression type")
        body = await self.read(exchange)
        if not body:
            raise invalid("content-encoding", "nothing to be decompressed")
        return await self._decompressed(body)

    async def _decompressed(self, body: bytes | bytearray) -> bytearray:
        """Decompress as far as possible: like Triton, do not look for a missing end or for bytes that follow."""
        packed, decoded = PackedBody(), bytearray()
        async for piece in packed.unpack(body):
            decoded += piece
            if len(decoded) > self._limit_bytes:
                text = f"Decompressed data size exceeds the maximum allowed value of {self._advice}"
                raise SluiceError(ErrorCode.TOO_LARGE, text)
            if packed.has_ended:
                break
        return decoded


def refuse_encoding(exchange: Exchange) -> None:
    """Raise INVALID for a body with a Content-Encoding, where Triton reads none."""
    if exchange.header(ENCODING) not in _NOT_ENCODED:
        raise invalid("content-encoding", "Unsupported content-encoding, only 'identity' is supported.")


class HeaderReader:
    """Reads headers into requests. Names that match `pattern` are forwarded; None forwards none."""

    def __init__(self, defaults: RequestOptions, pattern: str | None) -> None:
        self._defaults = defaults
        self._session_headers = frozenset(map(str.encode, session_header_names(defaults.session_headers)))
        self._forwarded = ForwardedHeaders(pattern)

    def schedule(self, exchange: Exchange, request: InferRequest) -> None:
        """Set tenant, priority and time limits. A header wins over the body. Raises INVALID, naming the header."""
        sessions = self._session_headers
        own = [name for name in exchange.headers if name.startswith(_OWN_PREFIX) or name in sessions]
        if own:
            self._read_own(exchange, request, own)
        call = current_call.get()
        if call is not None:
            request.tenant = call.tenant
            request.priority = allowed_priority(request.priority or None)

    def _read_own(self, exchange: Exchange, request: InferRequest, own: list[bytes]) -> None:
        scheduling = parse_scheduling({name.decode("latin-1"): exchange.header(name) for name in own}, self._defaults)
        request.tenant = scheduling.tenant
        request.session, request.parent_session = scheduling.session
        note_session(*scheduling.session)
        if scheduling.priority is not None:
            request.priority = scheduling.priority
        if scheduling.timeout_s is not None:
            request.timeout_us = round(scheduling.timeout_s * 1e6)
        if scheduling.queue_timeout_s is not None:
            request.queue_timeout_us = round(scheduling.queue_timeout_s * 1e6)

    def forward(self, exchange: Exchange, request: InferRequest) -> None:
        """Put the headers that match the pattern among the request's parameters. Raises INVALID for reserved names."""
        if not self._forwarded:
            return
        pairs = zip(exchange.names, exchange.raw_headers, strict=True)
        headers = ((name.decode("latin-1"), value.decode("utf-8", "replace")) for name, (_, value) in pairs)
        request.parameters.update(self._forwarded.choose(headers))
