"""Text that arrives in pieces, read by a generator as if all of it were there."""

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator
from functools import lru_cache
from typing import TypeVar

from sluice.pipelines.text.stream import find_partial
from sluice.pipelines.text.types import AnswerText, Part, ReasoningText

T = TypeVar("T")
Steps = Generator[Part | None, None, T]
"""Reads from a source: yields parts, and None where it needs more text before it can go on. Returns a T."""

_SPACE = re.compile(r"[ \t\r\n]*")
_IN_STRING = re.compile(r'[^"\\]*')
_BETWEEN = re.compile(r'[^"{}\[\]]*')
_SCALAR = re.compile(r"[^,}\] \t\r\n]*")


class UnexpectedText(Exception):
    """The text is not what its format says it should be at this place, or ends there."""


class TextSource:
    """The text that has arrived and was not read yet. Its methods are generators, for use with `yield from`. What they
    return and yield, once joined, does not depend on how the text arrived. Each reads text once, whatever its pieces:
    of the text before a piece, only what may begin a marker is still there when the piece arrives."""

    def __init__(self) -> None:
        self._text = ""
        self._at = 0
        self._num_added = 0
        self._is_ended = False
        self._marked: list[str] | None = None
        """The pieces that were read since `mark`; None outside of a passage."""
        self.is_all_text = False
        """Whether all that arrives from now on is text of the answer."""

    def add(self, text: str) -> None:
        """Add text that has arrived."""
        self._text, self._at = self._text[self._at :] + text, 0
        self._num_added += len(text)

    def end(self) -> None:
        """Note that no more text follows."""
        self._is_ended = True

    @property
    def num_unread(self) -> int:
        """Number of characters that have arrived and were not read yet."""
        return len(self._text) - self._at

    @property
    def num_read(self) -> int:
        """Number of characters that were read."""
        return self._num_added - self.num_unread

    def mark(self) -> None:
        """Begin a passage, which `since_mark` returns."""
        self._marked = []

    def since_mark(self) -> str:
        """Return what was read since `mark`, and end the passage."""
        marked, self._marked = self._marked or (), None
        return "".join(marked)

    def copy_until(self, *markers: str, make: Callable[[str], Part] = AnswerText) -> Steps[str]:
        """Yield the text before the first of the markers, in the parts that `make` makes of it. Return the marker,
        which is read; "" at the end of the text. Without markers yield all text."""
        self.is_all_text = not markers and make is AnswerText
        while True:
            start, marker = self._find(markers)
            if start > self._at:
                yield make(self._take(start))
            if marker:
                return self._take(start + len(marker))
            if self._is_ended:
                return ""
            yield None

    def take_until(self, *markers: str) -> Steps[tuple[str, str]]:
        """Return the text before the first of the markers, and the marker, both read; "" for it at the end."""
        pieces: list[str] = []
        while True:
            start, marker = self._find(markers)
            pieces.append(self._take(start))
            if marker or self._is_ended:
                return "".join(pieces), self._take(start + len(marker))
            yield None

    def skip_space(self) -> Steps[str]:
        """Read white space and return the character after it, which is not read; "" at the end of the text."""
        yield from self.take_run(_SPACE)
        return self._text[self._at : self._at + 1]

    def take_run(self, pattern: re.Pattern[str]) -> Steps[str]:
        """Read and return characters for as long as they match a pattern of any number of characters of one class."""
        pieces: list[str] = []
        while True:
            pieces.append(self._take(end_of(pattern, self._text, self._at)))
            if self.num_unread or self._is_ended:
                return "".join(pieces)
            yield None

    def starts_with(self, text: str) -> Steps[bool]:
        """Return whether `text` is next, and read it if so. Decides as soon as that is known."""
        while not self._is_ended and self.num_unread < len(text) and text.startswith(self._text[self._at :]):
            yield None
        if not self._text.startswith(text, self._at):
            return False
        self._take(self._at + len(text))
        return True

    def expect(self, text: str) -> Steps[None]:
        """Read `text`. Raises UnexpectedText where something else is next."""
        if not (yield from self.starts_with(text)):
            raise UnexpectedText

    def peek(self) -> Steps[str]:
        """Return the next character, which is not read; "" at the end of the text."""
        while not self.num_unread and not self._is_ended:
            yield None
        return self._text[self._at : self._at + 1]

    def take_char(self) -> Steps[str]:
        """Read and return the next character; "" at the end of the text."""
        yield from self.peek()
        return self._take(self._at + 1)

    def copy_json(self, make: Callable[[str], Part | None]) -> Steps[str]:
        """Read a JSON value and yield what `make` makes of its pieces. Return its text. Brackets and quotes decide
        where it ends; that its inside is valid is not checked. Raises UnexpectedText where the text ends within it."""
        pieces: list[str] = []
        scanner = JsonScanner()
        while True:
            end = scanner.find_end(self._text, self._at)
            if end is None and self._is_ended and scanner.is_scalar:
                end = len(self._text)
            piece = self._take(len(self._text) if end is None else end)
            if piece:
                pieces.append(piece)
                if (part := make(piece)) is not None:
                    yield part
            if end is not None:
                return "".join(pieces)
            if self._is_ended:
                raise UnexpectedText
            yield None

    def take_json(self) -> Steps[str]:
        """Read a JSON value and return its text. Raises as `copy_json`."""
        return (yield from self.copy_json(lambda piece: None))

    def _find(self, markers: tuple[str, ...]) -> tuple[int, str]:
        """Return where the first of the markers starts, and it. Without one, return "" and where one may start that is
        not complete yet."""
        if not markers:
            return len(self._text), ""
        search, max_held, first_chars = _compile(markers)
        text = self._text
        found = search(text, self._at)
        start, marker = (found.start(), found[0]) if found else (len(text), "")
        tail_start = max(self._at, len(text) - max_held)
        if start >= tail_start and not self._is_ended and not first_chars.isdisjoint(tail := text[tail_start:]):
            # A marker that began earlier or is longer may still be completed.
            partial = tail_start + min(find_partial(tail, each) for each in markers)
            if partial <= start:
                return partial, ""
        return start, marker

    def _take(self, end: int) -> str:
        taken, self._at = self._text[self._at : end], min(end, len(self._text))
        if self._marked is not None:
            self._marked.append(taken)
        return taken


@lru_cache(maxsize=256)
def _compile(markers: tuple[str, ...]) -> tuple[Callable[[str, int], re.Match[str] | None], int, frozenset[str]]:
    """Return a search for the first of the markers, the most characters of one that may have to wait for the rest, and
    the characters with which markers begin."""
    pattern = re.compile("|".join(map(re.escape, sorted(markers, key=len, reverse=True))))
    return pattern.search, max(map(len, markers)) - 1, frozenset(each[0] for each in markers)


class JsonScanner:
    """Finds the end of one JSON value in text that arrives in pieces. Each piece is scanned once."""

    def __init__(self) -> None:
        self._depth = 0
        self._is_in_string = self._is_escaped = False
        self.is_scalar = False
        """Whether the value is a number or a word, which ends before the character that follows it."""

    def find_end(self, text: str, at: int) -> int | None:
        """Return where the value ends in `text`, whose characters from `at` on are the next ones; None where the value
        goes on after them."""
        while at < len(text):
            if self._is_escaped:
                self._is_escaped = False
                at += 1
            elif self._is_in_string:
                at = end_of(_IN_STRING, text, at) + 1
                self._is_escaped = text[at - 1 : at] == "\\"
                self._is_in_string = at > len(text) or self._is_escaped
                if not self._is_in_string and not self._depth:
                    return at
            elif self.is_scalar or (not self._depth and text[at] not in '"{['):
                self.is_scalar = True
                at = end_of(_SCALAR, text, at)
                return at if at < len(text) else None
            else:
                at = end_of(_BETWEEN, text, at) + 1
                char = text[at - 1 : at]
                self._is_in_string = char == '"'
                self._depth += (char in "{[") - (char in "}]") if char else 0
                if char in ("}", "]") and not self._depth:
                    return at
        return None


def end_of(pattern: re.Pattern[str], text: str, at: int) -> int:
    """Return where what a pattern matches at `at` ends. The pattern must match no text too."""
    found = pattern.match(text, at)
    assert found is not None
    return found.end()


class PartReader(ABC):
    """Reads parts from a text that arrives in pieces. A subclass reads straight on, in `steps`."""

    def __init__(self) -> None:
        self.source = TextSource()
        self._steps = self.steps()
        self.reasoning: list[tuple[int, int]] = []
        """Where each passage of reasoning starts and ends in the text, in characters."""

    @abstractmethod
    def steps(self) -> Steps[None]:
        """Read the whole text from `source`, yielding its parts."""
        ...

    def feed(self, text: str) -> list[Part]:
        """Return the parts that more text completes."""
        self.source.add(text)
        return self._run()

    def finish(self) -> list[Part]:
        """Return the parts of what was kept back, at the end of the text."""
        self.source.end()
        return self._run()

    def _run(self) -> list[Part]:
        parts: list[Part] = []
        for part in self._steps:
            if part is None:
                break
            parts.append(part)
            if isinstance(part, ReasoningText):
                self._note_reasoning(len(part.text))
        return parts

    def _note_reasoning(self, num_chars: int) -> None:
        end = self.source.num_read
        start = end - num_chars
        if self.reasoning and self.reasoning[-1][1] == start:
            start = self.reasoning.pop()[0]
        self.reasoning.append((start, end))
