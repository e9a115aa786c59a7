"""The result of reading a document, and the decoding that all readers share.

Kept light to import: readers also run in processes that live for one document.
"""

import codecs

import msgspec

from sluice.errors import SluiceError, invalid

MAX_HEADING_CHARS = 200
_BOMS = ((codecs.BOM_UTF8, "utf-8"), (codecs.BOM_UTF16_LE, "utf-16-le"), (codecs.BOM_UTF16_BE, "utf-16-be"))


class Extract(msgspec.Struct, frozen=True):
    """A `ParsedDocument` in a form that can cross processes. `headings` are (start, level, text)."""

    text: str
    title: str = ""
    headings: list[tuple[int, int, str]] = []
    breaks: list[int] = []


def format_label(text: str) -> str:
    """Shorten a text to one line that fits a title or a path of headings."""
    line = " ".join(text.split())
    return line if len(line) <= MAX_HEADING_CHARS else line[: MAX_HEADING_CHARS - 1].rstrip() + "…"


def decode_text(content: bytes, encoding: str = "utf-8") -> str:
    """Decode a document, end its lines by "\\n", and drop its byte order mark, which takes precedence over `encoding`.

    Raises INVALID (param "content"), which names the byte offset, for bytes that the encoding does not allow, and for
    NUL, which no text contains and no store keeps.
    """
    num_skipped = 0
    for bom, bom_encoding in _BOMS:
        if content.startswith(bom):
            num_skipped, encoding = len(bom), bom_encoding
    try:
        text = content[num_skipped:].decode(encoding)
    except UnicodeDecodeError as error:
        raise _undecodable(encoding, content, num_skipped + error.start) from None
    if "\0" in text:
        num_before = len(text[: text.index("\0")].encode(encoding, "surrogatepass"))
        raise _undecodable(encoding, content, num_skipped + num_before)
    return text.replace("\r\n", "\n").replace("\r", "\n") if "\r" in text else text


def _undecodable(encoding: str, content: bytes, offset: int) -> SluiceError:
    other = ", nor does it start with a byte order mark of UTF-16" if encoding == "utf-8" else ""
    return invalid(
        "content",
        f"the document is not {encoding.upper()} text: byte 0x{content[offset]:02x} at offset {offset}{other}",
    )
