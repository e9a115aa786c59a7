"""The result of reading a document, and the decoding that all readers share.

Kept light to import: readers also run in processes that live for one document.
"""

import codecs

import msgspec

from sluice.errors import SluiceError, invalid
from sluice.pipelines.rag.documents.encodings import decode_bytes

MAX_HEADING_CHARS = 200
UTF_8 = "utf-8"
_BOMS = ((codecs.BOM_UTF8, UTF_8), (codecs.BOM_UTF16_LE, "utf-16le"), (codecs.BOM_UTF16_BE, "utf-16be"))


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


def find_mark(content: bytes) -> str:
    """Return the encoding that the document's byte order mark names, "" if it has none."""
    return next((encoding for bom, encoding in _BOMS if content.startswith(bom)), "")


def decode_text(content: bytes, encoding: str = UTF_8, *, replaces: bool = False) -> str:
    """Decode a document, end its lines by "\\n", and drop its byte order mark, which takes precedence over `encoding`.

    `encoding` is a name that `find_encoding` returned. With `replaces` U+FFFD stands for each byte that the encoding
    does not allow and for NUL, which no text contains and no store keeps. Else both raise INVALID (param "content"),
    which names the byte offset.
    """
    num_skipped = 0
    for bom, bom_encoding in _BOMS:
        if content.startswith(bom):
            num_skipped, encoding = len(bom), bom_encoding
    try:
        text = decode_bytes(content[num_skipped:], encoding, "replace" if replaces else "strict")
    except UnicodeDecodeError as error:
        raise _undecodable(encoding, content, num_skipped + error.start) from None
    if "\0" in text:
        if not replaces:
            raise _undecodable(encoding, content, num_skipped + _find_nul(text, content[num_skipped:], encoding))
        text = text.replace("\0", "\ufffd")
    return text.replace("\r\n", "\n").replace("\r", "\n") if "\r" in text else text


def _find_nul(text: str, content: bytes, encoding: str) -> int:
    """Return the offset of the first NUL. Only in UTF-16 a zero byte may be half of another character."""
    is_wide = encoding.startswith("utf-16")
    return len(text[: text.index("\0")].encode("utf-16-le", "surrogatepass")) if is_wide else content.index(b"\0")


def _undecodable(encoding: str, content: bytes, offset: int) -> SluiceError:
    other = ""
    if encoding == UTF_8:
        other = (
            ", nor does it start with a byte order mark of UTF-16; "
            "name another encoding as charset in the content type (sluice rag ingest: --encoding)"
        )
    return invalid(
        "content",
        f"the document is not {encoding.upper()} text: byte 0x{content[offset]:02x} at offset {offset}{other}",
    )
