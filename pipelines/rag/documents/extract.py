"""The result of reading a document, the encodings of documents, and the decoding that all readers share.

Kept light to import: readers also run in processes that live for one document.
"""

import codecs
import re
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from typing import Any

import msgspec

from sluice.errors import ErrorCode, SluiceError, invalid

_SPACE = rb"[\t\n\f\r ]"
_MARKUP = re.compile(
    rb"(?P<comment><!--)|(?P<meta><meta(?=[\t\n\f\r /]))|(?P<tag></?[a-z][^\t\n\f\r >]*+)|<[!/?]", re.IGNORECASE
)
_ATTRIBUTE = re.compile(
    rb"(?:%(s)b|/)*+(?:(?P<end>>)|(?P<name>[^\t\n\f\r />][^\t\n\f\r />=]*+)"
    rb"""(?:%(s)b*+=%(s)b*+(?:"(?P<double>[^"]*+)(?:"|\Z)|'(?P<single>[^']*+)(?:'|\Z)|(?P<bare>[^\t\n\f\r >]*+)))?+)"""
    % {b"s": _SPACE}
)
_CHARSET = re.compile(
    rb"""charset%(s)b*=%(s)b*(?:"([^"]*)"|'([^']*)'|([^"'\t\n\f\r ;][^\t\n\f\r ;]*)|["'])""" % {b"s": _SPACE},
    re.IGNORECASE,
)
_XML = re.compile(rb"""<\?xml(?=[\t\n\f\r ])[^>]*?\sencoding%(s)b*=%(s)b*["']([^"'<>]*)["']""" % {b"s": _SPACE})
_ALIASES = {"latin-1": "latin1"}
"""Python's spelling, which no browser knows: to those it is windows-1252 as any page that declares nothing."""
_REPLACEMENT = "replacement"
"""The standard's name of encodings that it no longer reads, such as ISO-2022-KR: their bytes can hide markup."""
MAX_HEADING_CHARS = 200
UTF_8 = "utf-8"
_PLAIN = (UTF_8, "utf8", "")
"""Labels of most requests, which need no table: UTF-8, and none at all."""
_UNICODE = (UTF_8, "utf-16le", "utf-16be")
"""Names under which Python has the standard's own decoders."""
_BOMS = ((codecs.BOM_UTF8, UTF_8), (codecs.BOM_UTF16_LE, "utf-16le"), (codecs.BOM_UTF16_BE, "utf-16be"))


def find_encoding(label: str) -> str:
    """Return the name of the encoding that a label means in the Encoding Standard, "" if it means none.

    The names are those of supersets: gb2312 is GBK, and iso-8859-1 windows-1252.
    """
    if (plain := label.strip().lower()) in _PLAIN:
        return UTF_8 if plain else ""
    found = _lookup(label)
    return "" if found is None or found.name == _REPLACEMENT else found.name


def missing_package(what: str, error: ModuleNotFoundError) -> SluiceError:
    """Return the error for something that needs a package of the extra `rag`."""
    return SluiceError(ErrorCode.UNIMPLEMENTED, f"{what}: {error.name} is not installed; pip install 'sluice[rag]'")


def _lookup(label: str) -> Any:
    try:
        import webencodings
    except ModuleNotFoundError as error:
        raise missing_package(f"the encoding {label}", error) from None
    return webencodings.lookup(_ALIASES.get(label.strip().lower(), label))


def decode_bytes(content: bytes, name: str, errors: str) -> str:
    """Decode bytes by an encoding of the standard; `name` is what `find_encoding` returned.

    `errors` is "strict", which raises UnicodeDecodeError, or "replace".
    """
    if name in _UNICODE:
        return content.decode(name, errors)
    if name == "euc-jp":
        errors = f"{_EUC_JP}{errors}"
    # The standard decodes GBK as GB18030, which contains it.
    found = _lookup("gb18030" if name == "gbk" else name)
    assert found is not None, name
    text: str = found.codec_info.decode(content, errors)[0]
    return text


_EUC_JP = "euc-jp-of-the-standard-"
"""Prefix of the names under which Python knows how to go on where its EUC-JP ends."""


def _decode_vendor_rows(error: UnicodeError, errors: str) -> tuple[str, int]:
    """Decode a character of the rows of JIS X 0208 that vendors filled, such as circled digits.

    Python's EUC-JP lacks them, and its Shift_JIS of Windows has them.
    """
    assert isinstance(error, UnicodeDecodeError)
    pair = error.object[error.start : error.start + 2]
    if len(pair) == 2 and min(pair) > 0xA0:
        row, cell = pair[0] - 0xA1, pair[1] - 0xA1
        lead = row // 2 + (0x81 if row < 62 else 0xC1)
        trail = cell + 0x9F if row % 2 else cell + 0x40 + (cell > 62)
        with suppress(UnicodeDecodeError):
            return bytes((lead, trail)).decode("cp932"), error.start + 2
    return codecs.lookup_error(errors)(error)  # type: ignore[return-value]  # bytes are for encoders


for _errors in ("strict", "replace"):
    codecs.register_error(f"{_EUC_JP}{_errors}", partial(_decode_vendor_rows, errors=_errors))


def find_declaration(page: bytes) -> str:
    """Return the label of the encoding that an HTML page declares, "" for none: the HTML Standard's prescan.

    Labels that mean no encoding are passed over. Pass no more of the page than where a declaration may stand.
    """
    if page.startswith((b"<\0?\0x\0", b"\0<\0?\0x")):
        return "utf-16le" if page[0] else "utf-16be"
    for attributes in _metas(page):
        label = _label_of_meta(attributes)
        if _lookup(label):
            return _readable(label)
    xml = _XML.match(page)
    label = xml[1].decode("latin-1") if xml else ""
    return _readable(label) if _lookup(label) else ""


def _readable(label: str) -> str:
    """Correct a declaration that cannot be true, as it was read byte by byte, as the standard does."""
    return {"utf-16le": "utf-8", "utf-16be": "utf-8", "x-user-defined": "windows-1252"}.get(find_encoding(label), label)


def _metas(page: bytes) -> Iterator[dict[bytes, bytes]]:
    """Yield the attributes of each `meta`. What stands in comments and in attributes of other elements is none."""
    place = 0
    while found := _MARKUP.search(page, place):
        if found["comment"]:
            place = page.find(b"-->", found.start() + 2) + 3
        elif found["meta"] or found["tag"]:
            attributes, place = _attributes(page, found.end())
            if found["meta"] and place:
                yield attributes
        else:
            place = page.find(b">", found.end()) + 1
        if place < found.end():  # it does not end within the page
            return


def _attributes(page: bytes, place: int) -> tuple[dict[bytes, bytes], int]:
    """Return a tag's attributes, the first of each name, and the place after the tag, 0 if it does not end."""
    attributes: dict[bytes, bytes] = {}
    while found := _ATTRIBUTE.match(page, place):
        place = found.end()
        if found["end"]:
            return attributes, place
        value = found["double"] or found["single"] or found["bare"] or b""
        attributes.setdefault(found["name"].lower(), value)
    return {}, 0


def _label_of_meta(attributes: dict[bytes, bytes]) -> str:
    """Return the label that a `meta` declares, "" for none."""
    label = attributes.get(b"charset")
    if label is None and attributes.get(b"http-equiv", b"").lower() == b"content-type":
        found = _CHARSET.search(attributes.get(b"content", b""))
        label = next(filter(None, found.groups()), b"") if found else b""
    return (label or b"").decode("latin-1")


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
