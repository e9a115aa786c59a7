"""Reads a request: its body, bounded in size and time and decompressed, and the headers that add to it."""

import asyncio
from collections.abc import Mapping
from typing import Any

from sluice.errors import ErrorCode, SluiceError, invalid
from sluice.gateway.calls import allowed_priority, current_call
from sluice.gateway.http.content_coding import ENCODING, PackedBody
from sluice.gateway.http.errors import UnknownEncodingError, body_too_large
from sluice.gateway.http.protocol import NAMES_AS_SENT
from sluice.gateway.http.request import BODY_TIMEOUT_S, body_timeout, next_piece, parse_scheduling
from sluice.gateway.http.v2.exchange import Exchange
from sluice.gateway.http.v2.json_document import parse
from sluice.gateway.long_work import LONG_BYTES, trim_later
from sluice.gateway.options.http import RequestOptions
from sluice.gateway.sessions import STICKY_HEADER as STICKY_TEXT
from sluice.gateway.v2.forwarded_headers import ForwardedHeaders
from sluice.serving.request import InferRequest

JSON_LENGTH_HEADER = b"inference-header-content-length"
STICKY_HEADER = STICKY_TEXT.encode()
"""Name of the header whose equal values get the same version of a model."""
_OWN_PREFIX = b"x-sluice-"
_NOT_ENCODED = ("", "identity")
_MAX_SETTINGS_BYTES = 64 << 10
"""Longest body of settings: it is parsed on the event loop."""


class BodyReader:
    """Reads bodies of up to `limit_bytes`, compressed or not."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._advice = f"{limit_bytes} bytes. Use --http-max-input-size to increase the limit."
        self._timeouts = _ReadTimeouts()

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
        declared = exchange.headers.get(b"content-length")
        if declared is not None and int(declared) > self._limit_bytes:
            raise self._too_large(exchange, f"{int(declared)}")
        reader = asyncio.current_task()
        assert reader is not None
        self._timeouts.begin(reader)
        try:
            return await self._collect(exchange, reader)
        except asyncio.CancelledError:
            if not self._timeouts.has_expired(reader):
                raise
            reader.uncancel()
            raise body_timeout() from None
        finally:
            self._timeouts.end(reader)

    async def _collect(self, exchange: Exchange, reader: asyncio.Task[Any]) -> bytes | bytearray:
        body, more = await next_piece(exchange.receive)
        pieces = bytearray(body) if more else body
        while more and len(pieces) <= self._limit_bytes:
            self._timeouts.begin(reader)
            piece, more = await next_piece(exchange.receive)
            pieces += piece
        if len(pieces) > self._limit_bytes:
            raise self._too_large(exchange, f"more than {self._limit_bytes}")
        if len(pieces) >= LONG_BYTES:
            trim_later()
        return pieces

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


class _ReadTimeouts:
    """Cancels tasks whose clients stopped sending. There is one timer for all: one each would cost more than a read."""

    def __init__(self) -> None:
        self._waiting_since: dict[asyncio.Task[Any], float] = {}
        self._expired: set[asyncio.Task[Any]] = set()
        self._is_watching = False

    def begin(self, reader: asyncio.Task[Any]) -> None:
        """Start the timeout of `reader`, which waits for its client's next piece."""
        loop = reader.get_loop()
        self._waiting_since[reader] = loop.time()
        if not self._is_watching:
            self._is_watching = True
            loop.call_later(BODY_TIMEOUT_S, self._look, loop)

    def end(self, reader: asyncio.Task[Any]) -> None:
        self._waiting_since.pop(reader, None)
        self._expired.discard(reader)

    def has_expired(self, reader: asyncio.Task[Any]) -> bool:
        """Whether `reader` was cancelled by its timeout."""
        return reader in self._expired

    def _look(self, loop: asyncio.AbstractEventLoop) -> None:
        now = loop.time()
        for reader, since in self._waiting_since.items():
            if now - since >= BODY_TIMEOUT_S and reader not in self._expired:
                self._expired.add(reader)
                reader.cancel()
        self._is_watching = bool(self._waiting_since)
        if self._is_watching:
            loop.call_later(BODY_TIMEOUT_S / 2, self._look, loop)


class HeaderReader:
    """Reads headers into requests. Names that match `pattern` are forwarded; None forwards none."""

    def __init__(self, defaults: RequestOptions, pattern: str | None) -> None:
        self._defaults = defaults
        self._session_headers = frozenset(name.encode() for name in defaults.session_headers)
        self._forwarded = ForwardedHeaders(pattern)

    def are_plain(self, headers: Mapping[bytes, bytes]) -> bool:
        """Whether nothing of a request's headers reaches its model: none is forwarded, and none schedules it."""
        for name in headers:
            if self._is_own(name):
                return False
        return not self._forwarded or not self._forwarded.are_any(name.decode("latin-1") for name in headers)

    def schedule(self, exchange: Exchange, request: InferRequest) -> None:
        """Set tenant, priority and time limits. A header wins over the body. Raises INVALID, naming the header."""
        own = [name for name in exchange.headers if self._is_own(name)]
        if own:
            self._read_own(exchange, request, own)
        call = current_call.get()
        if call is not None:
            request.tenant = call.tenant
            request.priority = allowed_priority(request.priority or None)

    def _is_own(self, name: bytes) -> bool:
        return name.startswith(_OWN_PREFIX) or name in self._session_headers

    def _read_own(self, exchange: Exchange, request: InferRequest, own: list[bytes]) -> None:
        scheduling = parse_scheduling({name.decode("latin-1"): exchange.header(name) for name in own}, self._defaults)
        request.tenant, request.session = scheduling.tenant, scheduling.session
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
        sent = exchange.scope.get("extensions", {}).get(NAMES_AS_SENT)
        names = sent["names"] if sent else [name for name, _ in exchange.scope["headers"]]
        pairs = zip(names, exchange.scope["headers"], strict=True)
        headers = ((name.decode("latin-1"), value.decode("utf-8", "replace")) for name, (_, value) in pairs)
        request.parameters.update(self._forwarded.choose(headers))
