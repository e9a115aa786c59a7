"""Bytes to characters."""

import codecs

from sluice.errors import SluiceError, invalid

_BOMS = ((codecs.BOM_UTF8, "utf-8"), (codecs.BOM_UTF16_LE, "utf-16-le"), (codecs.BOM_UTF16_BE, "utf-16-be"))


def decoded(content: bytes, encoding: str = "utf-8") -> str:
    """The text, its lines ended by "\\n" alone, without its byte order mark.

    A byte order mark goes before `encoding`. Raises INVALID (param "content"), which names the byte offset, for bytes
    that are not in the encoding, and for NUL: text has none, and stores keep none.
    """
    num_skipped = 0
    for bom, of_bom in _BOMS:
        if content.startswith(bom):
            num_skipped, encoding = len(bom), of_bom
    try:
        text = content[num_skipped:].decode(encoding)
    except UnicodeDecodeError as error:
        raise _not_in(encoding, content, num_skipped + error.start) from None
    if "\0" in text:
        num_before = len(text[: text.index("\0")].encode(encoding, "surrogatepass"))
        raise _not_in(encoding, content, num_skipped + num_before)
    return text.replace("\r\n", "\n").replace("\r", "\n") if "\r" in text else text


def _not_in(encoding: str, content: bytes, offset: int) -> SluiceError:
    other = ", nor does it start with a byte order mark of UTF-16" if encoding == "utf-8" else ""
    return invalid(
        "content",
        f"the document is not {encoding.upper()} text: byte 0x{content[offset]:02x} at offset {offset}{other}",
    )
