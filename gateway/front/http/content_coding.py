"""Bodies of requests that come compressed (Content-Encoding): they are unpacked piece by piece, within bounds."""

import zlib
from collections.abc import AsyncGenerator, Iterable
from contextlib import aclosing

from starlette.types import Scope

from sluice.errors import SluiceError, invalid
from sluice.gateway.front.http.errors import UnknownEncodingError, body_too_large
from sluice.gateway.front.long_work import run_aside

ENCODING, _LENGTH = b"content-encoding", b"content-length"
_UNPACKED = frozenset({"gzip", "x-gzip", "deflate"})
_NONE = frozenset({"", "identity"})
_SHOWN_CHARS = 60
_ANY_FORMAT = 15 | 32
"""zlib's window bits for a full window, gzip or zlib as the data says. Triton takes either under either name."""
_STEP_BYTES = 256 << 10
"""Bytes that are unpacked at once, in about a millisecond."""
_MAX_MEMBERS = 1024
"""Most gzip files in one body, one after the other. Each costs more than its bytes."""


def is_packed(headers: Iterable[tuple[bytes, bytes]]) -> bool:
    """Whether a body is to be unpacked. Raises UnknownEncodingError for what is neither that nor as it is."""
    sent = b",".join([value for name, value in headers if name == ENCODING]).decode("latin-1")
    codings = [each for part in sent.split(",") if (each := part.strip().lower()) not in _NONE]
    if len(codings) > 1 or not _UNPACKED.issuperset(codings):
        raise UnknownEncodingError(f"content-encoding must be gzip, deflate or identity, got {sent[:_SHOWN_CHARS]!r}")
    return bool(codings)


def without_encoding(scope: Scope) -> Scope:
    """Return the scope of a request whose body has been unpacked."""
    if all(name != ENCODING for name, _ in scope["headers"]):
        return scope
    headers = [header for header in scope["headers"] if header[0] not in (ENCODING, _LENGTH)]
    return {**scope, "headers": headers}


async def unpack_pieces(pieces: AsyncGenerator[bytes, None], limit_bytes: int) -> AsyncGenerator[bytes, None]:
    """Yield what `pieces` of a body hold. Raises INVALID for broken data, and TOO_LARGE for more than `limit_bytes`."""
    packed, num_bytes = PackedBody(), 0
    async with aclosing(pieces):
        async for piece in pieces:
            async for unpacked in packed.unpack(piece):
                num_bytes += len(unpacked)
                if num_bytes > limit_bytes:
                    raise body_too_large("is longer when it is unpacked", limit_bytes)
                yield unpacked
    packed.check_end()


class PackedBody:
    """A body as far as it has come and been unpacked."""

    def __init__(self) -> None:
        self._stream = zlib.decompressobj(_ANY_FORMAT)
        self._num_members = 1
        self._rest = b""

    @property
    def has_ended(self) -> bool:
        """Whether the data so far is whole. More may follow."""
        return self._stream.eof

    async def unpack(self, piece: bytes | bytearray) -> AsyncGenerator[bytes, None]:
        """Yield what is in `piece`, in short pieces: a few bytes may hold many megabytes. Raises INVALID."""
        if not piece:
            return
        unpacked = self._step(piece)
        yield unpacked
        while self._rest or len(unpacked) == _STEP_BYTES:
            unpacked = await run_aside(self._go_on)
            yield unpacked

    def check_end(self) -> None:
        """Raise INVALID where the end is missing."""
        if not self._stream.eof:
            raise _broken("its end is missing")

    def _go_on(self) -> bytes:
        return self._step(self._rest)

    def _step(self, data: bytes | bytearray) -> bytes:
        if self._stream.eof and data:
            self._begin_member()
        try:
            unpacked = self._stream.decompress(data, _STEP_BYTES)
        except zlib.error as error:
            raise _broken(str(error).rpartition(": ")[2]) from None
        self._rest = self._stream.unused_data if self._stream.eof else self._stream.unconsumed_tail
        return unpacked

    def _begin_member(self) -> None:
        self._stream = zlib.decompressobj(_ANY_FORMAT)
        self._num_members += 1
        if self._num_members > _MAX_MEMBERS:
            raise _broken(f"it has more than {_MAX_MEMBERS} parts")


def _broken(problem: str) -> SluiceError:
    return invalid("content-encoding", f"the request's body cannot be decompressed: {problem}")
