"""Reads JSON as Triton does, with its error messages for missing members and wrong types.

Triton answers 500 to JSON that cannot be parsed or has a wrong type, so these errors are INTERNAL.

A long document is read without holding the interpreter's lock for long, and without its tensors: arrays of plain values
stay text until their tensor's type is known. As Python's numbers they would take many times the document's size. What
is left of the document is short, and bounded.
"""

import json
import re
from codecs import BOM_UTF8
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import orjson
import rapidjson

from sluice.errors import ErrorCode, SluiceError
from sluice.gateway.front.http.json_pieces import (
    MARK,
    MAX_DEPTH,
    NO_BRACKETS,
    DocumentError,
    DocumentLimits,
    LongDocumentError,
    TooDeepError,
    blank_escapes,
    parse_pieces,
)
from sluice.gateway.front.long_work import breathe

MAX_DATA_DEPTH = 100
"""Arrays inside each other from which a tensor's `data` is refused. Elsewhere the parsers' own limits count."""
_MAX_UINT64 = 2**64 - 1
MAX_INT64 = 2**63 - 1
_PARSE_ERROR = re.compile(r"Parse error at offset (\d+): (.*)", re.DOTALL)
_BEYOND_ASCII_AS_QUESTION_MARKS = bytes(range(128)) + b"?" * 128
INLINE_BYTES = 64 << 10
"""Longest document that is parsed at once, in a few milliseconds."""
MIN_ARRAY_BYTES = 1024
"""Shortest array that stays text in a long document."""
MAX_TEXT_CHARS = 1 << 24
"""Most characters of a string for a model whose input is text: no context takes more. What joins the pieces of a
string, or encodes it, holds the interpreter's lock for all of it."""
LIMITS = DocumentLimits(values=1 << 17, members=1 << 15)
"""Most values of a document outside of long arrays: thousands of tensors have fewer."""
_WINDOW_BYTES = 64 << 10
_BRACKETS = re.compile(rb"[][{}]")
_ESCAPED = re.compile(rb"\\+\Z")
_WORDS_OF_TRITONS_RELEASE = {"Invalid encoding in string.": "Invalid escape character in string."}


def parse(body: bytes | bytearray | memoryview, offset: int = 0) -> object:
    """Return the document in `body`, whose first byte messages count as `offset`.

    Beyond JSON, NaN and infinities may be bare words, and strings hold any bytes: those that are no UTF-8 become lone
    surrogates (`surrogateescape`). A byte order mark is skipped. Raises INTERNAL.
    """
    try:
        return orjson.loads(body)
    except orjson.JSONDecodeError:
        return _parse_tolerantly(bytes(body).removeprefix(BOM_UTF8), offset)


def _parse_tolerantly(body: bytes, offset: int) -> object:
    try:
        if _is_utf8(body):
            return rapidjson.loads(body)
        return json.loads(body.decode("utf-8", "surrogateescape"))
    except RecursionError:
        raise too_deep() from None
    except ValueError:
        raise unreadable(f"failed to parse the request JSON buffer: {_complaint(body, offset)}") from None


def _is_utf8(body: bytes) -> bool:
    try:
        body.decode()
    except UnicodeDecodeError:
        return False
    return True


def _complaint(body: bytes, offset: int) -> str:
    """Return the message of RapidJSON, which Triton parses with, for a document that is no JSON."""
    try:
        rapidjson.loads(body.translate(_BEYOND_ASCII_AS_QUESTION_MARKS))
    except RecursionError:
        return "it is nested too deeply"
    except ValueError as error:
        match = _PARSE_ERROR.fullmatch(str(error))
        if match is not None:
            return f"{_WORDS_OF_TRITONS_RELEASE.get(match[2], match[2])} at {int(match[1]) + offset}"
    return "Invalid value. at 0"


def too_deep() -> SluiceError:
    """Return the error for arrays or objects inside each other beyond what is read."""
    return SluiceError(ErrorCode.INVALID, f"JSON nesting depth exceeds maximum allowed limit ({MAX_DATA_DEPTH})")


@contextmanager
def member_of_request(name: str) -> Iterator[None]:
    """Turn the errors of reading one member into INVALID ones that name it, where no request to a model is read."""
    try:
        yield
    except SluiceError as error:
        raise SluiceError(ErrorCode.INVALID, f"Unable to parse '{name}': {error.message}", param=name) from None


def unreadable(message: str) -> SluiceError:
    """Return an error of Triton's JSON library."""
    return SluiceError(ErrorCode.INTERNAL, message)


def mistyped(expected: str) -> str:
    """Return the message for a wrong type. `expected` is Triton's word for the type: string, boolean, array …"""
    kind = "number" if expected == "double" else expected
    return f"attempt to access JSON non-{kind} as {expected}"


def find(owner: object, name: str) -> object:
    """Return a member; None where it is absent or `owner` is no object. `has` tells null from absent."""
    return owner.get(name) if isinstance(owner, dict) else None


def has(owner: object, name: str) -> bool:
    return isinstance(owner, dict) and name in owner


def members(owner: object, prefix: str = "") -> dict[str, object]:
    """Return `owner` as an object. Raises INTERNAL, with `prefix` before the message."""
    if not isinstance(owner, dict):
        raise unreadable(f"{prefix}attempt to get members for non-object")
    return owner


def string(value: object, prefix: str = "") -> str:
    """Return `value`, which must be a string. Raises INTERNAL, with `prefix` before the message."""
    if not isinstance(value, str):
        raise unreadable(prefix + mistyped("string"))
    return value


def text(value: str, name: str) -> str:
    """Return `value`, which must be Unicode. Raises INVALID, naming it, for a string that was no UTF-8."""
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError:
            raise SluiceError(ErrorCode.INVALID, f"'{name}' is not UTF-8", param=name) from None
    return value


def boolean(value: object, prefix: str = "") -> bool:
    """Return `value`, which must be a boolean. Raises like `string`."""
    if not isinstance(value, bool):
        raise unreadable(prefix + mistyped("boolean"))
    return value


def unsigned(value: object, prefix: str = "") -> int:
    """Return `value`, which must be an unsigned integer of 64 bits. Raises like `string`."""
    if type(value) is not int or not 0 <= value <= _MAX_UINT64:
        raise unreadable(prefix + mistyped("unsigned-integer"))
    return value


def is_signed(value: object) -> bool:
    """Whether `value` is an integer of 64 bits."""
    return type(value) is int and -MAX_INT64 - 1 <= value <= MAX_INT64


def string_member(owner: object, name: str, prefix: str = "") -> str:
    """Return a member, which must be a string. Raises like `string`."""
    value = find(owner, name)
    return value if isinstance(value, str) else string(_present(owner, name, prefix), prefix)


def array_member(owner: object, name: str, prefix: str = "") -> list[object]:
    """Return a member, which must be an array. Raises like `string`."""
    value = find(owner, name)
    if isinstance(value, list):
        return value
    _present(owner, name, prefix)
    raise unreadable(prefix + mistyped("array"))


def _present(owner: object, name: str, prefix: str) -> object:
    if not isinstance(owner, dict) or name not in owner:
        raise unreadable(f"{prefix}attempt to access non-existing object member '{name}'")
    value: object = owner[name]
    return value


@dataclass(frozen=True, slots=True)
class ArrayText:
    """An array of values, or of arrays of values, as its client wrote it. `cuts` are commas, each with its depth.

    The first cut is before the array and the last one after it. No string may have more than `string_chars`.
    """

    body: memoryview
    cuts: list[tuple[int, int]]
    is_nested: bool
    string_chars: int | None

    def pieces(self) -> Iterator[list[Any]]:
        """Yield the values in order, a short time's work each, nested like in the array. Raises like `parse`."""
        for (before, depth), (end, end_depth) in zip(self.cuts, self.cuts[1:], strict=False):
            text = bytes(self.body[before + 1 : end])
            bare = text.strip()
            if (depth and bare[:1] in (b"", b"]")) or (end_depth and bare[-1:] in (b"", b"[")):
                raise unreadable(f"failed to parse the request JSON buffer: Invalid value. at {before + 1}")
            yield _parse_array(b"[" * depth + text + b"]" * end_depth, before + 1 - depth, self.string_chars)
            breathe()


def _parse_array(text: bytes, offset: int, string_chars: int | None) -> list[Any]:
    value = parse(text, offset) if len(text) <= 4 * _WINDOW_BYTES else _parse_pieces(text, string_chars)
    assert isinstance(value, list)
    return value


def parse_document(body: bytes | bytearray | memoryview, string_chars: int | None = None) -> object:
    """Return the document like `parse`, with long arrays of plain values as ArrayText where it is long.

    Raises like `parse`, and INVALID for a long document with more values than LIMITS allows, or with a string of more
    than `string_chars`.
    """
    if len(body) <= INLINE_BYTES:
        return parse(body)
    view = memoryview(body)
    if bytes(view[: len(BOM_UTF8)]) == BOM_UTF8:
        view = view[len(BOM_UTF8) :]
    with _as_parse_errors():
        arrays = _find_arrays(view, string_chars)
    document = _parse_pieces(_without(view, arrays) if arrays else view, string_chars)
    return _put_back(document, arrays) if arrays else document


def _parse_pieces(text: bytes | memoryview, string_chars: int | None) -> Any:
    if len(text) <= INLINE_BYTES:
        return parse(text)
    with _as_parse_errors():
        return parse_pieces(text, replace(LIMITS, string_chars=string_chars))


@contextmanager
def _as_parse_errors() -> Iterator[None]:
    try:
        yield
    except LongDocumentError as error:
        message = f"failed to parse the request JSON buffer: it {error}"
        raise SluiceError(ErrorCode.INVALID, message) from None
    except TooDeepError:
        raise too_deep() from None
    except DocumentError as error:
        raise unreadable(f"failed to parse the request JSON buffer: it {error}") from None


def _without(body: memoryview, arrays: list[ArrayText]) -> bytes:
    """Return the document with a marked string in place of each array."""
    pieces: list[bytes | memoryview] = []
    end = 0
    for number, array in enumerate(arrays):
        pieces += (body[end : array.cuts[0][0] + 1], b'"%s%d"' % (MARK.encode(), number))
        end = array.cuts[-1][0]
    return b"".join((*pieces, body[end:]))


def _put_back(document: object, arrays: list[ArrayText]) -> object:
    todo: list[Any] = [[document]]
    whole = todo[0]
    while todo:
        owner = todo.pop()
        for key, value in owner.items() if isinstance(owner, dict) else enumerate(owner):
            if isinstance(value, str) and value.startswith(MARK):
                owner[key] = arrays[int(value.removeprefix(MARK))]
            elif isinstance(value, dict | list):
                todo.append(value)
    return whole[0]


def _find_arrays(body: memoryview, string_chars: int | None) -> list[ArrayText]:
    finder = _ArrayFinder(body, string_chars)
    start = 0
    while start < len(body):
        window = bytes(body[start : start + _WINDOW_BYTES])
        escapes = _ESCAPED.search(window)
        if escapes is not None and len(escapes[0]) % 2 and start + len(window) < len(body):
            window = window[:-1]  # a backslash and what it escapes stay together
        finder.scan(window, start)
        start += len(window)
        breathe()
    return finder.found


class _ArrayFinder:
    """Finds arrays without objects in a document that is read window by window."""

    def __init__(self, body: memoryview, string_chars: int | None) -> None:
        self.found: list[ArrayText] = []
        self._body = body
        self._string_chars = string_chars
        self._is_in_string = False
        self._num_objects = 0
        self._cuts: list[tuple[int, int]] = []
        """Cuts of the array that is open; empty where none is."""
        self._depth = 0
        self._is_nested = False

    def scan(self, window: bytes, start: int) -> None:
        parts = blank_escapes(window).split(b'"')
        first = int(self._is_in_string)
        self._is_in_string ^= len(parts) % 2 == 0
        outside = b"".join(parts[first::2])
        self._num_objects += outside.count(b"{")
        if LIMITS.members is not None and self._num_objects > LIMITS.members:
            raise LongDocumentError(f"has more than {LIMITS.members} objects")
        brackets = outside.translate(None, NO_BRACKETS)
        if brackets and not self._stays_open(brackets):
            at = start
            for number, part in enumerate(parts):
                if number % 2 == first:
                    for bracket in _BRACKETS.finditer(part):
                        self._follow(bracket[0], at + bracket.start())
                at += len(part) + 1
        if self._cuts:
            self._cut(parts, first, start + len(window))

    def _stays_open(self, brackets: bytes) -> bool:
        """Whether `brackets` only open and close arrays within the one that is open. Follows them in that case."""
        if not self._cuts or b"{" in brackets or b"}" in brackets:
            return False
        depths = np.where(np.frombuffer(brackets, np.uint8) == ord("["), 1, -1).cumsum() + self._depth
        if depths.max() > MAX_DEPTH:
            raise TooDeepError("is nested too deeply")
        if depths.min() <= 0:
            return False
        self._depth, self._is_nested = int(depths[-1]), True
        return True

    def _follow(self, bracket: bytes, at: int) -> None:
        if bracket == b"[":
            if not self._cuts:
                self._cuts, self._is_nested = [(at - 1, 0)], False
            self._depth += 1
            if self._depth > MAX_DEPTH:
                raise TooDeepError("is nested too deeply")
            self._is_nested |= self._depth > 1
        elif bracket != b"]":
            self._cuts, self._depth = [], 0
        elif self._cuts:
            self._depth -= 1
            if not self._depth:
                cuts, self._cuts = self._cuts, []
                if at - cuts[0][0] >= MIN_ARRAY_BYTES:
                    cuts.append((at + 1, 0))
                    self.found.append(ArrayText(self._body, cuts, self._is_nested, self._string_chars))

    def _cut(self, parts: list[bytes], first: int, end: int) -> None:
        """Cut the open array at the window's last comma outside of strings, where it has one behind the last cut."""
        depth = self._depth
        for number in reversed(range(len(parts))):
            end -= len(parts[number])
            if number % 2 == first:
                outside, comma, after = parts[number].rpartition(b",")
                depth += after.count(b"]") - after.count(b"[")
                if comma:
                    if (at := end + len(outside)) > self._cuts[-1][0] and depth > 0:
                        self._cuts.append((at, depth))
                    return
            end -= 1
