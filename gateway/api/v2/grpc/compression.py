"""Messages that travel compressed: bounded when they come, and from a thread where they are long."""

import gzip
import zlib

from sluice.errors import ErrorCode, SluiceError
from sluice.gateway.front.long_work import LONG_BYTES, run_aside

ENCODINGS = ("identity", "deflate", "gzip")
LEVELS = {"none": 0, "low": 1, "medium": 6, "high": 9}
"""zlib's levels by the names of --grpc-infer-response-compression-level."""
_GZIP_OR_ZLIB = 32 + zlib.MAX_WBITS
_INLINE_BYTES = LONG_BYTES >> 4
"""Longest message that is packed or unpacked on the event loop."""


async def unpack(message: bytes | memoryview, max_bytes: int) -> bytes:
    """Return what a compressed message holds. Raises INTERNAL for a broken one, TOO_LARGE for more than `max_bytes`."""
    if len(message) <= _INLINE_BYTES >> 3:  # it may grow a thousandfold, to 8 MB
        return _unpack(message, max_bytes)
    return await run_aside(lambda: _unpack(message, max_bytes))


def _unpack(message: bytes | memoryview, max_bytes: int) -> bytes:
    unpacking = zlib.decompressobj(_GZIP_OR_ZLIB)
    try:
        unpacked = unpacking.decompress(message, max_bytes + 1)
    except zlib.error as error:
        raise SluiceError(ErrorCode.INTERNAL, f"a compressed message cannot be unpacked: {error}") from None
    if len(unpacked) > max_bytes:
        text = f"SERVER: Received message larger than max (more than {max_bytes} bytes unpacked)"
        raise SluiceError(ErrorCode.TOO_LARGE, text)
    if not unpacking.eof:
        raise SluiceError(ErrorCode.INTERNAL, "a compressed message cannot be unpacked: it has no end")
    if unpacking.unused_data:
        raise SluiceError(ErrorCode.INTERNAL, "a compressed message cannot be unpacked: it goes on behind its end")
    return unpacked


async def pack(message: bytes, level: int) -> bytes:
    """Return `message` as gzip."""
    if len(message) <= _INLINE_BYTES:
        return gzip.compress(message, level)
    return await run_aside(lambda: gzip.compress(message, level))
