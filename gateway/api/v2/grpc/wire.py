"""gRPC on the wire: a call's head, its metadata and timeout, the fields that end it; its messages, put together from
the pieces that they come in, and compressed ones, bounded when they come, and on a thread where they are long.

https://github.com/grpc/grpc/blob/master/doc/PROTOCOL-HTTP2.md
"""

import gzip
import re
import zlib
from base64 import b64decode, b64encode
from binascii import Error as Base64Error
from collections.abc import Iterable
from struct import Struct
from typing import NamedTuple
from urllib.parse import quote, unquote_to_bytes

import numpy as np

from sluice.errors import ErrorCode, SluiceError
from sluice.gateway.front.http2.frames import Fields, write_fields
from sluice.gateway.front.long_work import LONG_BYTES, run_aside

PREFIX = Struct(">BL")
"""The prefix of each message: the compressed flag, and the number of its bytes."""
_COPIED_BYTES = 64 << 10
_NO_BYTES = memoryview(b"")
Message = tuple[int, bytes | memoryview]
"""The flag of the prefix, and the message."""
ENCODINGS = ("identity", "deflate", "gzip")
LEVELS = {"none": 0, "low": 1, "medium": 6, "high": 9}
"""zlib's levels by the names of --grpc-infer-response-compression-level."""
_GZIP_OR_ZLIB = 32 + zlib.MAX_WBITS
_INLINE_BYTES = LONG_BYTES >> 4
"""Longest message that is packed or unpacked on the event loop."""
ENCODINGS_TEXT = ", ".join(ENCODINGS)
CONTENT_TYPE = b"application/grpc"
_CONTENT_TYPES = (CONTENT_TYPE, b"application/grpc+proto")
_INVALID_ARGUMENT = 3
_TIMEOUT_UNITS = {"H": 3600.0, "M": 60.0, "S": 1.0, "m": 1e-3, "u": 1e-6, "n": 1e-9}
_MAX_TIMEOUT_DIGITS = 8
_CONNECTION_FIELDS = {b"connection", b"keep-alive", b"proxy-connection", b"transfer-encoding", b"upgrade"}
_NAME = re.compile(rb"[!-9;-@\[-~]+")
"""Visible ASCII but upper case and the colon (RFC 9113, section 8.2.1)."""
_CUT_QUOTE = re.compile("%.?$")
_OWN_FIELDS = {b"te", b"content-type", b"content-length"}
_OWN_PREFIX = b"grpc-"
_PSEUDO_FIELDS = {b":method", b":scheme", b":path", b":authority"}
_NEEDED_PSEUDO_FIELDS = {b":method", b":scheme", b":path"}
_PRINTABLE = "".join(map(chr, range(0x20, 0x7F))).replace("%", "")
MAX_MESSAGE_BYTES = 4096
"""Longest text of a status, as it is sent. Clients refuse metadata of more than 8 KiB altogether."""
Metadata = tuple[tuple[str, str | bytes], ...]


class MessageTooLong(Exception):
    """A message is announced with `size` bytes, more than are taken."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.size = size


class Assembly:
    """The messages of one call. A long one is filled as its pieces come, so that no single copy takes long."""

    __slots__ = ("_buffer", "_flag", "_max_bytes", "_num_filled", "_prefix")

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._prefix = b""
        """The bytes of an incomplete prefix, else empty."""
        self._buffer: memoryview | None = None
        """The buffer of an incomplete message, else None."""
        self._num_filled = 0
        self._flag = 0

    @property
    def is_amid(self) -> bool:
        """Whether a message has begun and is not whole."""
        return self._buffer is not None or bool(self._prefix)

    @property
    def num_missing(self) -> int:
        """Bytes that the begun message lacks; 0 where none has begun."""
        return 0 if self._buffer is None else len(self._buffer) - self._num_filled

    def add(self, payload: bytes | memoryview) -> list[Message]:
        """Add what came next, and return the messages that are whole now. Raises MessageTooLong."""
        whole: list[Message] = []
        at = 0
        while at < len(payload):
            if self._buffer is not None:
                at = self._fill(payload, at)
            elif not self._prefix and len(payload) - at >= PREFIX.size:
                flag, size = PREFIX.unpack_from(payload, at)
                at += PREFIX.size
                if size <= len(payload) - at:
                    self._check(size)
                    whole.append((flag, bytes(payload[at : at + size])))
                    at += size
                    continue
                self._begin(flag, size)
            else:
                at = self._add_prefix(payload, at)
            if self._buffer is not None and self._num_filled == len(self._buffer):
                whole.append((self._flag, self._take()))
        return whole

    def _fill(self, payload: bytes | memoryview, at: int) -> int:
        assert self._buffer is not None
        end = min(at + self.num_missing, len(payload))
        filled = self._num_filled + end - at
        self._buffer[self._num_filled : filled] = payload[at:end]
        self._num_filled = filled
        return end

    def _add_prefix(self, payload: bytes | memoryview, at: int) -> int:
        end = at + PREFIX.size - len(self._prefix)
        self._prefix += bytes(payload[at:end])
        if len(self._prefix) == PREFIX.size:
            flag, size = PREFIX.unpack(self._prefix)
            self._prefix = b""
            self._begin(flag, size)
        return min(end, len(payload))

    def _check(self, size: int) -> None:
        if size > self._max_bytes:
            raise MessageTooLong(size)

    def _begin(self, flag: int, size: int) -> None:
        self._check(size)
        # numpy's memory is not touched before it is written: a client may announce what it never sends.
        self._buffer = np.empty(size, np.uint8).data if size else _NO_BYTES
        self._num_filled, self._flag = 0, flag

    def _take(self) -> bytes | memoryview:
        assert self._buffer is not None
        buffer, self._buffer = self._buffer, None
        return bytes(buffer) if len(buffer) <= _COPIED_BYTES else buffer.toreadonly()


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


class CallHead(NamedTuple):
    """The head of a call: its path, metadata and deadline."""

    path: str
    metadata: Metadata
    """The client's own fields. Those whose name ends in -bin are bytes."""
    timeout_s: float | None
    encoding: str
    """How messages that say so are compressed."""
    accepts_gzip: bool
    content_length: int | None
    refusal: bytes
    """The whole response to what is no call of gRPC; empty for one that is."""


def parse_head(fields: Fields) -> CallHead:
    """Parse the fields of a request. Raises ValueError for what HTTP/2 forbids (RFC 9113, section 8.3)."""
    pseudo: dict[bytes, bytes] = {}
    regular: list[tuple[bytes, bytes]] = []
    for name, value in fields:
        if name[:1] == b":":
            if regular or name in pseudo or name not in _PSEUDO_FIELDS:
                raise ValueError(f"the field {_show(name)} stands twice, too late or where it may not")
            pseudo[name] = value
        else:
            _check(name, value)
            regular.append((name, value))
    if (missing := _NEEDED_PSEUDO_FIELDS - pseudo.keys()) or not pseudo[b":path"]:
        raise ValueError(f"a request needs {_show(min(missing, default=b':path'))}")
    own = dict(regular)
    if len(own) < len(regular) and sum(name == b"content-length" for name, _ in regular) > 1:
        raise ValueError("content-length stands twice")
    timeout_s, bad_timeout = _read_timeout(own.get(b"grpc-timeout"))
    metadata, bad_metadata = _read_metadata(regular)
    refusal = b""
    if text := _find_refusal(pseudo[b":method"], own.get(b"content-type")):
        refusal = refusal_block(text)
    elif text := bad_timeout or bad_metadata:
        refusal = only_status_block(_INVALID_ARGUMENT, text)
    length = own.get(b"content-length")
    if length is not None and not length.isdigit():
        raise ValueError(f"content-length is a number, got {_show(length)}")
    return CallHead(
        pseudo[b":path"].decode("latin-1"),
        metadata,
        timeout_s,
        own.get(b"grpc-encoding", b"identity").decode("latin-1"),
        b"gzip" in (each.strip() for each in own.get(b"grpc-accept-encoding", b"").split(b",")),
        None if length is None else int(length),
        refusal,
    )


def _check(name: bytes, value: bytes) -> None:
    if not _NAME.fullmatch(name):
        raise ValueError(f"the name of a field is of visible ASCII in lower case, got {_show(name)}")
    if name in _CONNECTION_FIELDS or (name == b"te" and value != b"trailers"):
        raise ValueError(f"the field {_show(name)} is of HTTP/1")
    if any(byte in value for byte in b"\r\n\0"):
        raise ValueError(f"the field {_show(name)} has a line's end in its value")


def _find_refusal(method: bytes, content_type: bytes | None) -> str:
    kind = (content_type or b"").partition(b";")[0].strip().lower()
    if method != b"POST" or kind not in _CONTENT_TYPES:
        sent = f"{_show(method)} of content-type {_show(content_type or b'')}"
        return f"this port speaks gRPC, whose calls are POST of content-type application/grpc; got {sent}"
    return ""


def _is_own(name: bytes) -> bool:
    return name in _OWN_FIELDS or name.startswith(_OWN_PREFIX)


def _read_timeout(given: bytes | None) -> tuple[float | None, str]:
    """Return a call's timeout in seconds, and what is wrong with it, if anything is."""
    if given is None:
        return None, ""
    timeout_s = parse_timeout(given.decode("latin-1"))
    text = f"grpc-timeout is up to 8 digits and a unit of HMSmun, got {_show(given)}" if timeout_s is None else ""
    return timeout_s, text


def _read_metadata(regular: Fields) -> tuple[Metadata, str]:
    """Return the client's own fields, and what is wrong with them, if anything is."""
    found: list[tuple[str, str | bytes]] = []
    for name, value in regular:
        if _is_own(name):
            continue
        key = name.decode("latin-1")
        if not key.endswith("-bin"):
            found.append((key, _text_or_bytes(value)))
            continue
        for each in value.split(b","):  # several of one name may come as one
            each = each.strip()
            try:
                found.append((key, b64decode(each + b"=" * (-len(each) % 4), validate=True)))
            except Base64Error:
                return (), f"the metadata {key} must be base64, got {_show(each)}"
    return tuple(found), ""


def _text_or_bytes(value: bytes) -> str | bytes:
    try:
        return value.decode()
    except UnicodeDecodeError:
        return value


def _show(text: bytes) -> str:
    return repr(text[:80].decode("latin-1"))


def parse_timeout(text: str) -> float | None:
    """Return the seconds of a `grpc-timeout`; None for what is none."""
    digits, unit = text[:-1], text[-1:]
    if unit not in _TIMEOUT_UNITS or not (digits.isascii() and digits.isdigit()) or len(digits) > _MAX_TIMEOUT_DIGITS:
        return None
    return int(digits) * _TIMEOUT_UNITS[unit]


# --- what is sent ---


def response_fields(encoding: str = "") -> bytes:
    """Return the block that begins a response whose messages may be compressed as `encoding`."""
    fields = [(b"content-type", CONTENT_TYPE), (b"grpc-accept-encoding", ENCODINGS_TEXT.encode())]
    if encoding:
        fields.append((b"grpc-encoding", encoding.encode()))
    return write_fields(fields, 200)


def status_fields(code: int, message: str, metadata: Iterable[tuple[str, str | bytes]] = ()) -> Fields:
    """Return the fields that end a call."""
    fields = [(b"grpc-status", b"%d" % code)]
    if message:
        fields.append((b"grpc-message", encode_message(message)))
    for name, value in metadata:
        raw = b64encode(value).rstrip(b"=") if isinstance(value, bytes) else quote(value, safe=_PRINTABLE).encode()
        fields.append((name.lower().encode(), raw))
    return fields


def encode_message(message: str) -> bytes:
    """Return a status's text with what is not printable as %XX, cut where it is very long."""
    quoted = quote(message, safe=_PRINTABLE, errors="replace")
    if len(quoted) > MAX_MESSAGE_BYTES:
        whole = unquote_to_bytes(_CUT_QUOTE.sub("", quoted[:MAX_MESSAGE_BYTES])).decode("utf-8", "ignore")
        quoted = quote(whole, safe=_PRINTABLE) + "..."
    return quoted.encode()


RESPONSE_FIELDS = response_fields()
GZIP_FIELDS = response_fields("gzip")
OK_FIELDS = write_fields(status_fields(0, ""))


def refusal_block(message: str) -> bytes:
    """Return the whole response to a request that is no call: HTTP's own status, and the reason."""
    return write_fields([(b"content-type", CONTENT_TYPE), *status_fields(_INVALID_ARGUMENT, message)], 415)


def only_status_block(code: int, message: str, metadata: Iterable[tuple[str, str | bytes]] = ()) -> bytes:
    """Return the whole response of a call that ends without a message."""
    return write_fields([(b"content-type", CONTENT_TYPE), *status_fields(code, message, metadata)], 200)
