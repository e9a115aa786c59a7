"""Reads a request's body from ASGI: never more than is allowed, never for ever, and out of its compression."""

import asyncio
import zlib
from typing import Any

from starlette.requests import ClientDisconnect

from gateway.http.body import PATIENCE_S
from gateway.http.v2.errors import UnknownEncodingError
from gateway.http.v2.exchange import Exchange
from sluice.errors import ErrorCode, SluiceError, invalid

_ANY_FORMAT = 15 | 32
"""zlib's window bits for: full window, gzip or zlib as the data says. Triton takes either under either name."""
_SMALL_BYTES = 256 << 10
"""What is decompressed on the event loop: longer input goes to a thread."""


class BodyReader:
    """Reads bodies of up to `limit_bytes`, compressed or not."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._patience = _Patience()

    async def read(self, exchange: Exchange) -> bytes:
        """The body as it came.

        Raises TOO_LARGE as soon as that is known, DEADLINE where the client stops sending, and ClientDisconnect.
        """
        declared = exchange.headers.get(b"content-length")
        if declared is not None and int(declared) > self._limit_bytes:
            raise self._too_large(f"is {int(declared)} bytes")
        reader = asyncio.current_task()
        assert reader is not None
        self._patience.begin(reader)
        try:
            return await self._collect(exchange, reader)
        except asyncio.CancelledError:
            if not self._patience.has_run_out(reader):
                raise
            reader.uncancel()
            text = f"the request's body stopped arriving for {PATIENCE_S:.0f} s"
            raise SluiceError(ErrorCode.DEADLINE, text) from None
        finally:
            self._patience.end(reader)

    async def _collect(self, exchange: Exchange, reader: asyncio.Task[Any]) -> bytes:
        body, more = await _next_piece(exchange)
        if len(body) > self._limit_bytes:
            raise self._too_large("is longer")
        if not more:
            return body
        pieces = bytearray(body)
        while more:
            self._patience.begin(reader)
            piece, more = await _next_piece(exchange)
            pieces += piece
            if len(pieces) > self._limit_bytes:
                raise self._too_large("is longer")
        return bytes(pieces)

    async def read_decoded(self, exchange: Exchange) -> bytes:
        """The body without its Content-Encoding. Raises UnknownEncodingError, INVALID for broken data."""
        if b"content-encoding" not in exchange.headers:
            return await self.read(exchange)
        encoding = exchange.header(b"content-encoding")
        if encoding in ("", "identity"):
            return await self.read(exchange)
        if encoding not in ("gzip", "deflate"):
            raise UnknownEncodingError
        body = await self.read(exchange)
        if not body:
            raise invalid("content-encoding", "nothing to be decompressed")
        if len(body) < _SMALL_BYTES:
            return self._decompressed(body)
        return await asyncio.to_thread(self._decompressed, body)

    def _decompressed(self, body: bytes) -> bytes:
        """As far as it goes: like Triton, an end that is missing and bytes that follow are not looked for."""
        stream = zlib.decompressobj(_ANY_FORMAT)
        try:
            decoded = stream.decompress(body, self._limit_bytes + 1)
        except zlib.error as error:
            raise invalid("content-encoding", f"the request's body cannot be decompressed: {error}") from None
        if len(decoded) > self._limit_bytes:
            raise self._too_large("is longer when decompressed")
        return decoded

    def _too_large(self, what: str) -> SluiceError:
        text = f"request body {what}; at most {self._limit_bytes} bytes are allowed (--http-max-input-size)"
        return SluiceError(ErrorCode.TOO_LARGE, text)


async def _next_piece(exchange: Exchange) -> tuple[bytes, bool]:
    """The next piece of the body, and whether more follows."""
    message = await exchange.receive()
    if message["type"] == "http.disconnect":
        raise ClientDisconnect
    return message.get("body", b""), message.get("more_body", False)


class _Patience:
    """Cancels the tasks that read from clients gone silent. One timer for all: one each would cost more than a read."""

    def __init__(self) -> None:
        self._waiting_since: dict[asyncio.Task[Any], float] = {}
        self._run_out: set[asyncio.Task[Any]] = set()
        self._is_watching = False

    def begin(self, reader: asyncio.Task[Any]) -> None:
        """`reader` waits for its client's next piece from now on."""
        loop = reader.get_loop()
        self._waiting_since[reader] = loop.time()
        if not self._is_watching:
            self._is_watching = True
            loop.call_later(PATIENCE_S, self._look, loop)

    def end(self, reader: asyncio.Task[Any]) -> None:
        self._waiting_since.pop(reader, None)
        self._run_out.discard(reader)

    def has_run_out(self, reader: asyncio.Task[Any]) -> bool:
        """Whether it was this that cancelled `reader`."""
        return reader in self._run_out

    def _look(self, loop: asyncio.AbstractEventLoop) -> None:
        now = loop.time()
        for reader, since in self._waiting_since.items():
            if now - since >= PATIENCE_S and reader not in self._run_out:
                self._run_out.add(reader)
                reader.cancel()
        self._is_watching = bool(self._waiting_since)
        if self._is_watching:
            loop.call_later(PATIENCE_S / 2, self._look, loop)
