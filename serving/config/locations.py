"""Where each field of a config.pbtxt stands, by its path."""

import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace

from serving.findings import Finding

FieldPath = tuple[tuple[str, int], ...]
"""Names from the top, each with the number of its occurrence under its parent, from 0."""

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

    `line` and `column` are the name's, of the second and later values in a list their own. `begin` and `end` are the
    value's own characters; `statement` is where the field's name begins and its last value ends, brackets included.
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


def read_fields(text: str) -> tuple[WrittenField, ...]:
    """Every field of `text` in its order, up to the first place that nothing can be made of."""
    reader = _Reader(text)
    with suppress(_LostError, RecursionError):  # protobuf's parser stops there too, and says why
        reader.read_fields((), "")
    return tuple(reader.fields)


class _LostError(Exception):
    """Nothing can be made of the text from here on."""


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
        self._tokens = self._tokens_of(text)
        self._next = next(self._tokens)
        self._last_end = 0
        self._line = 0

    def _tokens_of(self, text: str) -> Iterator[_Token]:
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
        """Fields until the mark `close`, until the end of the text for ""."""
        counts: dict[str, int] = {}
        while self._next is not _END and not (close and self._next.text == close):
            self._read_statement(parent, counts)
            self._take_if(",", ";")
        if close and not self._take_if(close):
            raise _LostError

    def _read_statement(self, parent: FieldPath, counts: dict[str, int]) -> None:
        """A field's name and its value, or its list of values."""
        name = self._take()
        if name.kind != "word":
            raise _LostError
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
        place = name.begin
        while not self._take_if("]"):
            self._read_value(parent, name, place, counts)
            self._take_if(",")
            place = self._next.begin

    def _read_value(self, parent: FieldPath, name: _Token, place: int, counts: dict[str, int]) -> None:
        """`place` is what the field's line and column are taken from."""
        number = counts.get(name.text, 0)
        counts[name.text] = number + 1
        path = (*parent, (name.text, number))
        line, column = self._position(place)
        index, token = len(self.fields), self._take()
        is_message = token.kind == "mark" and token.text in ("{", "<")
        if not is_message and token.kind not in ("string", "word"):
            raise _LostError
        written = WrittenField(path, line, column, None, token.begin, self._last_end)
        self.fields.append(written)
        value = None
        if is_message:
            self.read_fields(path, _CLOSES[token.text])
        else:
            value = self._scalar(token)
        self.fields[index] = replace(written, value=value, end=self._last_end)

    def _scalar(self, token: _Token) -> str:
        """Strings side by side are one."""
        text = token.text[1:-1] if token.kind == "string" else token.text
        while token.kind == "string" and self._next.kind == "string":
            text += self._take().text[1:-1]
        return text

    def _position(self, offset: int) -> tuple[int, int]:
        while self._line + 1 < len(self._line_starts) and self._line_starts[self._line + 1] <= offset:
            self._line += 1
        return self._line + 1, offset - self._line_starts[self._line] + 1


_SEGMENT = re.compile(r'(?P<name>\w+)(?:\[(?:(?P<index>\d+)|"(?P<key>[^"]*)")\])?(?:\.|$)')


class FieldLocations:
    """The fields of one text, by path."""

    def __init__(self, fields: tuple[WrittenField, ...] = ()) -> None:
        self.fields = fields
        self._by_path = {each.path: each for each in fields}
        # A map's entries are written one after the other; whoever asks for one knows its key.
        self._keys = {
            each.path[:-1]: each.value for each in fields if each.path[-1][0] == "key" and each.value is not None
        }

    def find(self, path: str) -> WrittenField | None:
        """The field at `path`, else the nearest around it that is written; None where none is."""
        found = None
        inner: FieldPath = ()
        for name, index, key in _SEGMENT.findall(path):
            number = int(index or 0) if not key else self._number_of(inner, name, key)
            inner = (*inner, (name, number))
            if inner not in self._by_path:
                break
            found = self._by_path[inner]
        return found

    def line_of(self, path: str) -> int | None:
        """Where the field stands, or what is nearest around it."""
        found = self.find(path)
        return None if found is None else found.line

    def locate(self, finding: Finding) -> Finding:
        """The finding with its line; as it is where it has one, or where nothing of its path is written."""
        return finding if finding.line else replace(finding, line=self.line_of(finding.path))

    def locate_all(self, findings: Iterable[Finding]) -> tuple[Finding, ...]:
        return tuple(self.locate(each) for each in findings)

    def _number_of(self, parent: FieldPath, name: str, key: str) -> int:
        numbers = (
            path[-1][1]
            for path, given in self._keys.items()
            if given == key and path[:-1] == parent and path[-1][0] == name
        )
        return next(numbers, -1)


NOWHERE = FieldLocations()
"""Of a configuration without a text."""


def locate_fields(text: str) -> FieldLocations:
    """Of what can be read of the text."""
    return FieldLocations(read_fields(text))
