"""The frames of HTTP/2 and their blocks of header fields: their form on the wire, and the errors that end a stream or a
connection (RFC 9113)."""

import logging
from collections.abc import Callable, Iterable
from enum import IntEnum
from struct import Struct
from typing import Generic, TypeVar

from hpack import Decoder, HPACKError, OversizedHeaderListError
from hpack.hpack import encode_integer

H = TypeVar("H")
T = TypeVar("T", bytes, bytes | memoryview)

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
"""The connection preface, the first bytes of a client."""
HEAD_BYTES = 9
HEAD = Struct(">HBBBL")
"""A frame's length (16 bits and 8), type, flags and stream."""
MAX_FRAME_BYTES = 16_384
"""Longest payload that each side takes unless it says otherwise, and that this server takes."""
MAX_WINDOW = 2**31 - 1
DEFAULT_WINDOW = 65_535
DATA, HEADERS, PRIORITY, RST_STREAM, SETTINGS, PUSH_PROMISE, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = range(10)
END_STREAM = ACK = 0x1
END_HEADERS, PADDED, HAS_PRIORITY = 0x4, 0x8, 0x20
_LONG = Struct(">L")
_SETTING = Struct(">HL")
_GOAWAY = Struct(">LL")
logging.getLogger("hpack").setLevel(logging.INFO)  # below that it writes fields into the log, and keys with them
Fields = list[tuple[bytes, bytes]]
MAX_LIST_BYTES = 64 << 10
"""Longest list of fields, counted as RFC 9113 counts it: 32 bytes for each field more than it has."""
_MAX_KEPT = 64
"""Most blocks that are remembered. A client that varies its fields without its table grows no memory."""
_STATUS_NAME = b"\x08"
"""`:status` as a name, by its number in the table that everybody has (RFC 7541, appendix A)."""
EMPTY_TABLE = b"\x20"
"""A block's begin that says that its writer uses no table (RFC 7541, section 6.3)."""


class Setting(IntEnum):
    """A parameter of a SETTINGS frame."""

    HEADER_TABLE_SIZE = 1
    ENABLE_PUSH = 2
    MAX_CONCURRENT_STREAMS = 3
    INITIAL_WINDOW_SIZE = 4
    MAX_FRAME_SIZE = 5
    MAX_HEADER_LIST_SIZE = 6


class H2ErrorCode(IntEnum):
    """Why a stream or a connection ends (RFC 9113, section 7)."""

    NO_ERROR = 0
    PROTOCOL_ERROR = 1
    INTERNAL_ERROR = 2
    FLOW_CONTROL_ERROR = 3
    SETTINGS_TIMEOUT = 4
    STREAM_CLOSED = 5
    FRAME_SIZE_ERROR = 6
    REFUSED_STREAM = 7
    CANCEL = 8
    COMPRESSION_ERROR = 9
    CONNECT_ERROR = 10
    ENHANCE_YOUR_CALM = 11
    INADEQUATE_SECURITY = 12
    HTTP_1_1_REQUIRED = 13


class ConnectionFault(Exception):
    """The other side broke the protocol: the connection ends with `code`."""

    def __init__(self, code: H2ErrorCode, text: str) -> None:
        super().__init__(text)
        self.code = code


class StreamFault(Exception):
    """The other side broke a rule on one stream, which ends with `code`; the connection goes on."""

    def __init__(self, stream_id: int, code: H2ErrorCode, text: str) -> None:
        super().__init__(text)
        self.stream_id = stream_id
        self.code = code


def head(length: int, kind: int, flags: int, stream_id: int) -> bytes:
    """Return the first nine bytes of a frame."""
    return HEAD.pack(length >> 8, length & 0xFF, kind, flags, stream_id)


def settings(values: dict[Setting, int]) -> bytes:
    payload = b"".join(_SETTING.pack(key, value) for key, value in values.items())
    return head(len(payload), SETTINGS, 0, 0) + payload


def parse_settings(payload: bytes) -> list[tuple[int, int]]:
    """Return the settings of a frame in order, unknown ones too. Raises ConnectionFault for another length."""
    if len(payload) % _SETTING.size:
        raise ConnectionFault(
            H2ErrorCode.FRAME_SIZE_ERROR, f"SETTINGS of {len(payload)} bytes, expected a multiple of 6"
        )
    return list(_SETTING.iter_unpack(payload))


SETTINGS_ACK = head(0, SETTINGS, ACK, 0)


def ping(payload: bytes, is_ack: bool) -> bytes:
    return head(8, PING, ACK if is_ack else 0, 0) + payload


def window_update(stream_id: int, increment: int) -> bytes:
    return head(4, WINDOW_UPDATE, 0, stream_id) + _LONG.pack(increment)


def reset(stream_id: int, code: int) -> bytes:
    return head(4, RST_STREAM, 0, stream_id) + _LONG.pack(code)


def goaway(last_stream_id: int, code: int, text: str = "") -> bytes:
    payload = _GOAWAY.pack(last_stream_id, code) + text.encode()
    return head(len(payload), GOAWAY, 0, 0) + payload


def long_headers(stream_id: int, block: bytes, *, is_last: bool) -> bytes:
    """Return the frames of a block that is too long for one."""
    pieces = [block[at : at + MAX_FRAME_BYTES] for at in range(0, len(block), MAX_FRAME_BYTES)]
    written = head(len(pieces[0]), HEADERS, END_STREAM if is_last else 0, stream_id) + pieces[0]
    for each in pieces[1:-1]:
        written += head(len(each), CONTINUATION, 0, stream_id) + each
    return written + head(len(pieces[-1]), CONTINUATION, END_HEADERS, stream_id) + pieces[-1]


def parse_long(payload: bytes) -> int:
    """Return the 32 bits of a frame that has no more. The caller checks the length."""
    return int(_LONG.unpack(payload)[0])


def strip_padding(payload: T) -> T:
    """Return a padded frame's content. Raises ConnectionFault for padding as long as the frame."""
    if not payload:
        raise ConnectionFault(H2ErrorCode.FRAME_SIZE_ERROR, "a padded frame without its length of padding")
    if (num_bytes := payload[0]) >= len(payload):
        raise ConnectionFault(H2ErrorCode.PROTOCOL_ERROR, f"padding of {num_bytes} bytes in a frame of {len(payload)}")
    return payload[1 : len(payload) - num_bytes]


class HeaderBlockReader(Generic[H]):
    """Reads the blocks of one connection, in order. `make` turns fields into what the connection's owner needs.

    A client's compressor refers to what it sent before, so that all calls of a connection to one method have the same
    few bytes. They stand for the same fields until the compressor's table changes, and are read once until then.
    """

    def __init__(self, make: Callable[[Fields], H]) -> None:
        self._make = make
        self._decoder = Decoder(MAX_LIST_BYTES)
        self._kept: dict[bytes, H] = {}

    def read(self, block: bytes) -> H:
        """Return what `make` makes of a block. Raises ConnectionFault for what cannot be read, and what `make` does."""
        kept = self._kept.get(block)
        if kept is not None:
            return kept
        fields, changed = self._decode(block)
        if changed:
            self._kept.clear()
        made = self._make(fields)
        if not changed and len(self._kept) < _MAX_KEPT:
            self._kept[block] = made
        return made

    def _decode(self, block: bytes) -> tuple[Fields, bool]:
        """Return the fields of a block, and whether reading it again would give others or change the table."""
        table = self._decoder.header_table
        before = table.dynamic_entries[0] if table.dynamic_entries else None
        size = table.maxsize
        try:
            fields = [(name, value) for name, value in self._decoder.decode(block, raw=True)]
        except OversizedHeaderListError:
            text = f"header fields of more than {MAX_LIST_BYTES} bytes"
            raise ConnectionFault(H2ErrorCode.ENHANCE_YOUR_CALM, text) from None
        except HPACKError as error:
            raise ConnectionFault(H2ErrorCode.COMPRESSION_ERROR, str(error)) from None
        after = table.dynamic_entries[0] if table.dynamic_entries else None
        return fields, after is not before or table.maxsize != size or _has_table_change(block)

    def read_others(self, block: bytes) -> Fields:
        """Return the fields of a block that is no request's begin. Raises ConnectionFault."""
        fields, changed = self._decode(block)
        if changed:
            self._kept.clear()
        return fields


def _has_table_change(block: bytes) -> bool:
    """Whether a block begins with a change of the table's size, which may empty the table and fill it again."""
    return bool(block) and block[0] & 0xE0 == 0x20


def write_fields(fields: Iterable[tuple[bytes, bytes]], status: int | None = None) -> bytes:
    """Return the block of `fields` as literals that no table keeps, behind `status` where there is one."""
    block = bytearray()
    if status is not None:
        block += _STATUS_NAME + _write_text(str(status).encode())
    for name, value in fields:
        block += b"\x00" + _write_text(name) + _write_text(value)
    return bytes(block)


def _write_text(text: bytes) -> bytes:
    return bytes(encode_integer(len(text), 7)) + text
