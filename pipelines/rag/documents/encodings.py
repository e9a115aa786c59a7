"""Finds the encoding of a document: the labels of the Encoding Standard, and the declarations of an HTML page."""

import codecs
import re
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from typing import Any

import webencodings

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


def find_encoding(label: str) -> str:
    """Return the name of the encoding that a label means in the Encoding Standard, "" if it means none.

    The names are those of supersets: gb2312 is GBK, and iso-8859-1 windows-1252.
    """
    found = _lookup(label)
    return "" if found is None or found.name == _REPLACEMENT else found.name


def _lookup(label: str) -> Any:
    return webencodings.lookup(_ALIASES.get(label.strip().lower(), label))


def decode_bytes(content: bytes, name: str, errors: str) -> str:
    """Decode bytes by an encoding of the standard; `name` is what `find_encoding` returned.

    `errors` is "strict", which raises UnicodeDecodeError, or "replace".
    """
    if name == "euc-jp":
        errors = f"{_EUC_JP}{errors}"
    # The standard decodes GBK as GB18030, which contains it.
    found = webencodings.lookup("gb18030" if name == "gbk" else name)
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
