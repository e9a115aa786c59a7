"""Parses a long JSON document in pieces. A parser holds the interpreter's lock for all of a document, 64 MB of which
take it up to two seconds, and every other request waits for the lock."""

import re
import secrets
from dataclasses import dataclass
from typing import Any

import orjson

from sluice.gateway.front.long_work import breathe

Container = list[Any] | dict[str, Any]

INLINE_BYTES = 32 << 10
"""Longest body that is parsed on the event loop, in a few milliseconds where it has the smallest values."""

PIECE_BYTES = 64 << 10
"""A piece takes up to two milliseconds."""

MAX_DEPTH = 1000
"""Most arrays and objects within each other. The parser of the pieces takes 1024."""

_MAX_PENDING_BYTES = 1 << 20
"""Longest stretch without a place to cut: a name, a number or a document that is one string."""

# A client must not know it: a name or a string of its own would be taken for ours.
MARK = secrets.token_hex(16)
"""Begins the strings that are put into a document in place of others: names before it, values after it, arrays."""
_BEFORE, _AFTER = f"{MARK}<", f"{MARK}>"
_OPENINGS = {ord("["): b"[", ord("{"): b'{"%s":' % _BEFORE.encode()}
_ENDINGS = {ord("["): b',"%s"' % _AFTER.encode(), ord("{"): b',"%s":0' % _AFTER.encode()}
_TEXT_ENDING = _AFTER.encode() + b'"'
_CLOSINGS = {ord("["): b"]", ord("{"): b"}"}
NO_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))
_WHITE_SPACE = b" \t\r\n"
_FIRST_HALF = re.compile(rb"\\u[dD][89abAB]")


class DocumentError(ValueError):
    """Says why a body is no document that can be used, in words that follow "the body"."""


class TooDeepError(DocumentError):
    """The document has too many arrays and objects within each other."""


class LongDocumentError(DocumentError):
    """Says which limit a document exceeds."""


@dataclass(frozen=True, slots=True)
class DocumentLimits:
    """Most values of a document; most arrays, objects and members of objects, which cost more than numbers; most
    strings, with the names of members; and most characters of a string, of which joining its pieces makes a copy."""

    values: int | None = None
    members: int | None = None
    strings: int | None = None
    string_chars: int | None = None


def parse_pieces(body: bytes | memoryview, limits: DocumentLimits | None = None, piece_bytes: int = PIECE_BYTES) -> Any:
    """Return the document in `body`, as orjson parses it, without holding the lock for longer than a piece takes.

    Raises DocumentError for what is no JSON, for more than `limits` allow, and where a piece ends in an object that has
    the same name twice in it.
    """
    document = Document(limits or DocumentLimits(), piece_bytes)
    document.feed(body)
    return document.finish()


class Document:
    """A document as far as it has been fed, up to the last place where it was cut: before a comma, or in a string.

    A piece becomes a document of its own: it gets the brackets that are open before it, with a first value in the
    innermost, and those that close it, after a last value by which the innermost is known. Its values are then moved
    into the containers that were open.
    """

    def __init__(self, limits: DocumentLimits, piece_bytes: int = PIECE_BYTES) -> None:
        self._limits = limits
        self._piece_bytes = piece_bytes
        self._num_values = 0
        self._num_members = 0
        self._num_strings = 0
        self._num_fed = 0
        self._pending = b""
        """The bytes that follow the last cut."""
        self._has_begun = False
        self._root: Any = None
        self._brackets = b""
        self._open: list[Container] = []
        """The containers that are open at the last cut, and in `_brackets` what opens them."""
        self._text: list[str] | None = None
        """The pieces of the string that was cut. It is the innermost container's value at `_text_key`."""
        self._text_key: Any = None
        self._text_chars = 0

    def feed(self, body: bytes | bytearray | memoryview) -> None:
        """Parse the next part of the document, piece by piece. Raises as `parse_pieces`."""
        view = memoryview(body)
        for start in range(0, len(view), self._piece_bytes):
            if start:
                breathe()
            self._feed_piece(bytes(view[start : start + self._piece_bytes]))

    def _feed_piece(self, window: bytes) -> None:
        self._num_fed += len(window)
        piece = self._pending + window
        if self._text is not None:
            rest = self._continue_text(piece, self._text)
            if rest is None:
                return
            piece = rest
        parts = blank_escapes(piece).split(b'"')
        end, outside = _last_comma(parts, len(piece))
        if end:
            self._pending = piece[end:]
            self._take(piece[:end], outside)
            return
        is_in_string = len(parts) % 2 == 0
        if is_in_string and len(parts[-1]) > self._piece_bytes and self._begin_text(piece, parts):
            return
        self._pending = piece if is_in_string else _strip_end(piece)
        if len(self._pending) > _MAX_PENDING_BYTES:
            raise self._error("a name or a number is too long")

    def finish(self) -> Any:
        """Return the document. Nothing more may be fed."""
        if self._text is not None:
            raise self._error("unexpected end of data in a string")
        outside = b'"'.join(blank_escapes(self._pending).split(b'"')[::2])
        _, num_left = self._follow_brackets(outside)
        self._merge(self._parse(self._pending, outside, b""), num_left)
        return self._root

    def _take(self, piece: bytes, outside: bytes) -> None:
        """Parse `piece`, which ends before a comma. `outside` is what it has between strings, a quote for each."""
        brackets, num_left = self._follow_brackets(outside)
        if not brackets:
            raise self._error("unexpected content after document")
        self._open_tail(self._parse(piece, outside, _ENDINGS[brackets[-1]], brackets), brackets, num_left)
        innermost = self._open[-1]
        ending = innermost.pop(_AFTER, None) if isinstance(innermost, dict) else innermost.pop() if innermost else None
        if ending != (0 if isinstance(innermost, dict) else _AFTER):
            raise self._repeated_name()

    def _begin_text(self, piece: bytes, parts: list[bytes]) -> bool:
        """Cut the string in which `piece` ends. False: it cannot be cut, because it is a name or all of the document"""
        outside = b'"'.join(parts[::2])
        brackets, num_left = self._follow_brackets(outside)
        before = outside.rstrip(_WHITE_SPACE)[-1:]
        if not brackets or not (before in (b":", b"[") or (before == b"," and brackets.endswith(b"["))):
            return False
        start = len(piece) - len(parts[-1])
        end = start + _find_cut(piece[start:], parts[-1])
        self._pending = piece[end:]
        tail = self._open_tail(self._parse(piece[:end], outside, _TEXT_ENDING, brackets), brackets, num_left)
        self._text_key = _last_key(tail)
        first = self._open[-1][self._text_key]
        if not (isinstance(first, str) and first.endswith(_AFTER)):
            raise self._repeated_name()
        self._text = [first.removesuffix(_AFTER)]
        self._text_chars = len(self._text[0])
        return True

    def _continue_text(self, piece: bytes, text: list[str]) -> bytes | None:
        """Take what `piece` has of the string that was cut. Returns what follows it, None where it goes on."""
        blanked = blank_escapes(piece)
        end = blanked.find(b'"')
        has_end = end >= 0
        if not has_end:
            end = _find_cut(piece, blanked)
        try:
            text.append(orjson.loads(b'"' + piece[:end] + b'"'))
        except orjson.JSONDecodeError as error:
            raise self._error(error.msg) from None
        self._text_chars += len(text[-1])
        if self._limits.string_chars is not None and self._text_chars > self._limits.string_chars:
            raise LongDocumentError(f"has a string of more than {self._limits.string_chars} characters")
        if not has_end:
            self._pending = piece[end:]
            return None
        self._open[-1][self._text_key] = "".join(text)
        self._text = None
        return piece[end + 1 :]

    def _parse(self, piece: bytes, outside: bytes, ending: bytes, brackets: bytes = b"") -> Any:
        """Return `piece` as a document, with what is open before it, `ending` and what closes `brackets`."""
        self._count(outside)
        begin = b"".join([*map(_OPENINGS.__getitem__, self._brackets), b"0"]) if self._has_begun else b""
        try:
            return orjson.loads(b"".join((begin, piece, ending, *map(_CLOSINGS.__getitem__, reversed(brackets)))))
        except orjson.JSONDecodeError as error:
            raise self._error(error.msg) from None

    def _merge(self, node: Any, num_left: int) -> Any:
        """Move the values of `node`, a whole piece, into the containers that were open before it. Returns its part of
        the innermost one that stays open."""
        if not self._has_begun:
            self._has_begun, self._root = True, node
            return [node]
        tail = None
        for number, container in enumerate(self._open, 1):
            child = node.pop(_BEFORE if isinstance(container, dict) else 0)
            if isinstance(container, dict):
                container.update(node)
            else:
                container += node
            if number == num_left:
                tail = node
            node = child
        return tail

    def _open_tail(self, node: Any, brackets: bytes, num_left: int) -> Any:
        """Merge `node`, and remember which containers are open after it. Returns its part of the innermost."""
        tail = self._merge(node, num_left)
        del self._open[num_left:]
        while len(self._open) < len(brackets):
            tail = tail[_last_key(tail)]
            if not isinstance(tail, dict if brackets[len(self._open)] == ord("{") else list) or not tail:
                raise self._repeated_name()
            self._open.append(tail)
        self._brackets = brackets
        return tail

    def _follow_brackets(self, outside: bytes) -> tuple[bytes, int]:
        """Return the brackets that are open after `outside`, and how many of those before it stay open."""
        brackets, num_left = bytearray(self._brackets), len(self._brackets)
        for bracket in outside.translate(None, NO_BRACKETS):
            if bracket in _CLOSINGS:
                brackets.append(bracket)
                if len(brackets) > MAX_DEPTH:
                    raise TooDeepError(f"is not valid JSON: recursion limit exceeded near byte {self._num_fed}")
                continue
            if not brackets:
                raise self._error("unexpected content after document")
            brackets.pop()
            num_left = min(num_left, len(brackets))
        return bytes(brackets), num_left

    def _count(self, outside: bytes) -> None:
        self._num_values += outside.count(b",")
        self._num_members += outside.count(b"[") + outside.count(b"{") + outside.count(b":")
        self._num_strings += outside.count(b'"')
        for num, most, what in (
            (self._num_values + 1, self._limits.values, "values"),
            (self._num_members, self._limits.members, "members, objects and arrays"),
            (self._num_strings, self._limits.strings, "strings"),
        ):
            if most is not None and num > most:
                raise LongDocumentError(f"has more than {most} {what}")

    def _error(self, reason: str) -> DocumentError:
        return DocumentError(f"is not valid JSON: {reason} near byte {self._num_fed}")

    def _repeated_name(self) -> DocumentError:
        return self._error("an object has a name twice")


def blank_escapes(piece: bytes) -> bytes:
    """Return `piece` with another character for each escaped one of backslash and quote.

    A quote then begins or ends a string, and a backslash begins an escape.
    """
    return piece.replace(rb"\\", rb"\_").replace(rb"\"", rb"\_")


def _last_comma(parts: list[bytes], size: int) -> tuple[int, bytes]:
    """Return the place of the last comma outside of strings, 0 for none, and what is outside of strings before it.

    Every second of the `parts` of a piece of `size` bytes is in a string.
    """
    start = size + 1
    for index in reversed(range(len(parts))):
        start -= len(parts[index]) + 1
        if index % 2 == 0 and (at := parts[index].rfind(b",")) >= 0 and start + at > 0:
            return start + at, b'"'.join((*parts[:index:2], parts[index][:at]))
    return 0, b""


def _find_cut(text: bytes, blanked: bytes) -> int:
    """Return where `text`, the inside of a string, can be cut without cutting a character."""
    at = blanked.find(b"\\", max(0, len(blanked) - 6))
    if at >= 0:
        return at - 6 if at >= 6 and _FIRST_HALF.match(blanked, at - 6) else at
    end = len(text)
    while end > 0 and text[end - 1] >= 0x80 and len(text) - end < 4:
        end -= 1
        if text[end] >= 0xC0:  # the first byte of a character
            break
    return end


def _strip_end(piece: bytes) -> bytes:
    """Return `piece` with one space for all white space at its end, of which there may be megabytes."""
    stripped = piece.rstrip(_WHITE_SPACE)
    return stripped if len(stripped) == len(piece) else stripped + b" "


def _last_key(container: Container) -> Any:
    return next(reversed(container)) if isinstance(container, dict) else -1
