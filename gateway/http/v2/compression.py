"""Accept-Encoding: infer answers are compressed when the client asks for it, as Triton's are."""

import asyncio
import zlib
from typing import NamedTuple

_KNOWN = ("identity", "deflate", "gzip")
_GZIP_WINDOW, _ZLIB_WINDOW = 15 | 16, 15
_LEVEL = 1
"""Fast: an answer is read once, by who waits for it."""
_SMALL_BYTES = 64 << 10
"""What is compressed on the event loop: longer answers go to a thread."""


class Encoded(NamedTuple):
    """A body and the header that says how it is compressed."""

    body: bytes
    headers: tuple[tuple[bytes, bytes], ...] = ()


async def encoded(body: bytes, accept: str) -> Encoded:
    """`body` in the form that `accept` likes best."""
    encoding = preferred(accept) if accept else "identity"
    if encoding == "identity":
        return Encoded(body)
    window = _GZIP_WINDOW if encoding == "gzip" else _ZLIB_WINDOW
    if len(body) < _SMALL_BYTES:
        compressed = _compressed(body, window)
    else:
        compressed = await asyncio.to_thread(_compressed, body, window)
    return Encoded(compressed, ((b"content-encoding", encoding.encode()),))


def _compressed(body: bytes, window: int) -> bytes:
    stream = zlib.compressobj(_LEVEL, zlib.DEFLATED, window)
    return stream.compress(body) + stream.flush()


def preferred(accept: str) -> str:
    """The known encoding with the highest weight; of equal ones the first."""
    best, highest = "identity", 0.0
    for each in accept.split(","):
        name, _, weight_text = each.strip().partition(";q=")
        try:
            weight = float(weight_text or 1)
        except ValueError:
            continue
        if name in _KNOWN and weight > highest:
            best, highest = name, weight
    return best
