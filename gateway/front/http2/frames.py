"""The frames of HTTP/2: their form on the wire, and the errors that end a stream or a connection (RFC 9113)."""

from enum import IntEnum
from struct import Struct
from typing import TypeVar

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


class Setting(IntEnum):
    """A parameter of a SETTINGS frame."""

    HEADER_TABLE_SIZE = 1
    ENABLE_PUSH = 2
    MAX_CONCURRENT_STREAMS = 3
    INITIAL_WINDOW_SIZE = 4
    MAX_FRAME_SIZE = 5
    MAX_HEADER_LIST_SIZE = 6


class ErrorCode(IntEnum):
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

    def __init__(self, code: ErrorCode, text: str) -> None:
        super().__init__(text)
        self.code = code


class StreamFault(Exception):
    """The other side broke a rule on one stream, which ends with `code`; the connection goes on."""

    def __init__(self, stream_id: int, code: ErrorCode, text: str) -> None:
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
        raise ConnectionFault(ErrorCode.FRAME_SIZE_ERROR, f"SETTINGS of {len(payload)} bytes, expected a multiple of 6")
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
        raise ConnectionFault(ErrorCode.FRAME_SIZE_ERROR, "a padded frame without its length of padding")
    if (num_bytes := payload[0]) >= len(payload):
        raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, f"padding of {num_bytes} bytes in a frame of {len(payload)}")
    return payload[1 : len(payload) - num_bytes]
