"""Reads a request: its body, bounded in size and time and decompressed, and the headers that add to it."""

from sluice.errors import ErrorCode, SluiceError, invalid
from sluice.gateway.api.v2.forwarded_headers import ForwardedHeaders
from sluice.gateway.api.v2.http.exchange import AsgiExchange
from sluice.gateway.api.v2.http.json_document import parse
from sluice.gateway.calls import allowed_priority, current_call
from sluice.gateway.front.http.content_coding import ENCODING, PackedBody
from sluice.gateway.front.http.errors import UnknownEncodingError, body_too_large
from sluice.gateway.front.http.exchange import Exchange
from sluice.gateway.front.http.request import next_piece, parse_scheduling
from sluice.gateway.front.long_work import LONG_BYTES, trim_later
from sluice.gateway.options.http import RequestOptions
from sluice.gateway.plane.models import STICKY_HEADER as STICKY_TEXT
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
        self._session_headers = frozenset(name.encode() for name in defaults.session_headers)
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
        pairs = zip(exchange.names, exchange.raw_headers, strict=True)
        headers = ((name.decode("latin-1"), value.decode("utf-8", "replace")) for name, (_, value) in pairs)
        request.parameters.update(self._forwarded.choose(headers))
