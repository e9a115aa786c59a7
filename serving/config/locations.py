"""Locations of the fields in a config.pbtxt, also an invalid one: protobuf's text parser does not keep them."""

import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace

from sluice.serving.findings import Finding

FieldPath = tuple[tuple[str, int], ...]
"""Field names from the top, each with the number of its occurrence in its parent, from 0."""

_SEGMENT = re.compile(r'(?P<name>\w+)(?:\[(?:(?P<index>\d+)|"(?P<key>[^"]*)")\])?(?:\.|$)')
_TOKEN = re.compile(
    r"""(?P<space>[\s]+ | \#[^\n]*)
      | (?P<string>"(?:\\.|[^"\\\n])*" | '(?:\\.|[^'\\\n])*')
      | (?P<mark>[{}<>\[\]:,;])
      | (?P<word>[^\s{}<>\[\]:,;"'\#]+)
      | (?P<stray>.)""",
    re.VERBOSE,
)
_CLOSES = {"{": "}", "<": ">"}


@dataclass(frozen=True, slots=True)
class WrittenField:
    """One value of a field. `value` is a scalar's text without quotes, None for a message.

    `line` and `column` are those of the field's name; for the second and later values of a list, the value's own.
    `begin` and `end` delimit the value, `statement` everything from the field's name to the end of its last value.
    """

    path: FieldPath
    line: int
    column: int
    value: str | None
    begin: int
    end: int
    statement: tuple[int, int] = (0, 0)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(name for name, _ in self.path)


class FieldLocations:
    """The fields of one text by path."""

    def __init__(self, fields: tuple[WrittenField, ...] = ()) -> None:
        self.fields = fields
        self._by_path = {each.path: each for each in fields}
        # A map's entries are numbered in the text, and paths name them by key.
        self._keys = {
            each.path[:-1]: each.value for each in fields if each.path[-1][0] == "key" and each.value is not None
        }

    def find(self, path: str) -> WrittenField | None:
        """Return the field at `path`, else the innermost message around it in the text; None for neither."""
        found = None
        inner: FieldPath = ()
        for name, index, key in _SEGMENT.findall(path):
            number = int(index or 0) if not key else self._entry_number(inner, name, key)
            inner = (*inner, (name, number))
            if inner not in self._by_path:
                break
            found = self._by_path[inner]
        return found

    def line_of(self, path: str) -> int | None:
        """Return the line of the field, or of the innermost message around it."""
        found = self.find(path)
        return None if found is None else found.line

    def locate(self, finding: Finding) -> Finding:
        """Return the finding with its line; unchanged where it has one, or where its path is not in the text."""
        return finding if finding.line else replace(finding, line=self.line_of(finding.path))

    def locate_all(self, findings: Iterable[Finding]) -> tuple[Finding, ...]:
        return tuple(self.locate(each) for each in findings)

    def _entry_number(self, parent: FieldPath, name: str, key: str) -> int:
        numbers = (
            path[-1][1]
            for path, given in self._keys.items()
            if given == key and path[:-1] == parent and path[-1][0] == name
        )
        return next(numbers, -1)


NOWHERE = FieldLocations()
"""The locations of a configuration without a text."""


def locate_fields(text: str) -> FieldLocations:
    """Return the locations of the fields, in order, up to the first place that cannot be read."""
    reader = _Reader(text)
    with suppress(_UnreadableError, RecursionError):  # protobuf's parser stops there too, with the reason
        reader.read_fields((), "")
    return FieldLocations(tuple(reader.fields))


class _UnreadableError(Exception):
    """The text cannot be read from here on."""


@dataclass(frozen=True, slots=True)
class _Token:
    kind: str
    text: str
    begin: int


_END = _Token("end", "", -1)


class _Reader:
    def __init__(self, text: str) -> None:
        self.fields: list[WrittenField] = []
        self._line_starts = [0, *(match.end() for match in re.finditer("\n", text))]
        self._tokens = self._tokenize(text)
        self._next = next(self._tokens)
        self._last_end = 0
        self._line = 0

    def _tokenize(self, text: str) -> Iterator[_Token]:
        for match in _TOKEN.finditer(text):
            if match.lastgroup != "space":
                yield _Token(match.lastgroup or "", match[0], match.start())
        while True:
            yield _END

    def _take(self) -> _Token:
        token, self._next = self._next, next(self._tokens)
        self._last_end = token.begin + len(token.text)
        return token

    def _take_if(self, *marks: str) -> bool:
        is_there = self._next.kind == "mark" and self._next.text in marks
        if is_there:
            self._take()
        return is_there

    def read_fields(self, parent: FieldPath, close: str) -> None:
        """Read fields up to the mark `close`; for "", up to the end of the text."""
        counts: dict[str, int] = {}
        while self._next is not _END and not (close and self._next.text == close):
            self._read_statement(parent, counts)
            self._take_if(",", ";")
        if close and not self._take_if(close):
            raise _UnreadableError

    def _read_statement(self, parent: FieldPath, counts: dict[str, int]) -> None:
        """Read a field's name and its value, or its list of values."""
        name = self._take()
        if name.kind != "word":
            raise _UnreadableError
        self._take_if(":")
        first = len(self.fields)
        if self._take_if("["):
            self._read_list(parent, name, counts)
        else:
            self._read_value(parent, name, name.begin, counts)
        span = (name.begin, self._last_end)
        depth = len(parent) + 1
        for index in range(first, len(self.fields)):
            if len(self.fields[index].path) == depth:
                self.fields[index] = replace(self.fields[index], statement=span)

    def _read_list(self, parent: FieldPath, name: _Token, counts: dict[str, int]) -> None:
        offset = name.begin
        while not self._take_if("]"):
            self._read_value(parent, name, offset, counts)
            self._take_if(",")
            offset = self._next.begin

    def _read_value(self, parent: FieldPath, name: _Token, offset: int, counts: dict[str, int]) -> None:
        """Read a value. The field's line and column are those of `offset`."""
        number = counts.get(name.text, 0)
        counts[name.text] = number + 1
        path = (*parent, (name.text, number))
        line, column = self._position(offset)
        index, token = len(self.fields), self._take()
        is_message = token.kind == "mark" and token.text in ("{", "<")
        if not is_message and token.kind not in ("string", "word"):
            raise _UnreadableError
        written = WrittenField(path, line, column, None, token.begin, self._last_end)
        self.fields.append(written)
        value = None
        if is_message:
            self.read_fields(path, _CLOSES[token.text])
        else:
            value = self._scalar(token)
        self.fields[index] = replace(written, value=value, end=self._last_end)

    def _scalar(self, token: _Token) -> str:
        """Return the text of a scalar. Adjacent strings are one."""
        text = token.text[1:-1] if token.kind == "string" else token.text
        while token.kind == "string" and self._next.kind == "string":
            text += self._take().text[1:-1]
        return text

    def _position(self, offset: int) -> tuple[int, int]:
        while self._line + 1 < len(self._line_starts) and self._line_starts[self._line + 1] <= offset:
            self._line += 1
        return self._line + 1, offset - self._line_starts[self._line] + 1
