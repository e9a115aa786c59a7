"""Blocks of header fields: read with `hpack`, once for as long as a connection repeats them, and written without state.

A client's compressor refers to what it sent before, so that all calls of a connection to one method have the same few
bytes. They stand for the same fields until the compressor's table changes, and are read once until then.
"""

import logging
from collections.abc import Callable, Iterable
from typing import Generic, TypeVar

from hpack import Decoder, HPACKError, OversizedHeaderListError
from hpack.hpack import encode_integer

from sluice.gateway.front.http2.frames import ConnectionFault, ErrorCode

logging.getLogger("hpack").setLevel(logging.INFO)  # below that it writes fields into the log, and keys with them
T = TypeVar("T")
Fields = list[tuple[bytes, bytes]]
MAX_LIST_BYTES = 64 << 10
"""Longest list of fields, counted as RFC 9113 counts it: 32 bytes for each field more than it has."""
_MAX_KEPT = 64
"""Most blocks that are remembered. A client that varies its fields without its table grows no memory."""
_STATUS_NAME = b"\x08"
"""`:status` as a name, by its number in the table that everybody has (RFC 7541, appendix A)."""
EMPTY_TABLE = b"\x20"
"""A block's begin that says that its writer uses no table (RFC 7541, section 6.3)."""


class HeaderReader(Generic[T]):
    """Reads the blocks of one connection, in order. `make` turns fields into what the connection's owner needs."""

    def __init__(self, make: Callable[[Fields], T]) -> None:
        self._make = make
        self._decoder = Decoder(MAX_LIST_BYTES)
        self._kept: dict[bytes, T] = {}

    def read(self, block: bytes) -> T:
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
            raise ConnectionFault(ErrorCode.ENHANCE_YOUR_CALM, text) from None
        except HPACKError as error:
            raise ConnectionFault(ErrorCode.COMPRESSION_ERROR, str(error)) from None
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
