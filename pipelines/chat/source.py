"""Text that arrives in pieces, read by a generator as if all of it were there."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator
from typing import TypeVar

from pipelines.text.parts import AnswerText, CallArguments, Part
from pipelines.text.stream import find_partial

T = TypeVar("T")
Steps = Generator[Part | None, None, T]
"""Reads from a source: yields parts, and None where it needs more text before it can go on. Returns a T."""

_SPACE = " \t\r\n"
_ENDS_SCALAR = ",]}" + _SPACE


class UnexpectedText(Exception):
    """The text is not what its format says it should be at this place, or ends there."""


class TextSource:
    """The text that has arrived and was not read yet. Its methods are generators, for use with `yield from`. What they
    return and yield, once joined, does not depend on how the text arrived."""

    def __init__(self) -> None:
        self._text = ""
        self._is_ended = False
        self._read: list[str] = []
        """What was read since `mark`."""

    def add(self, text: str) -> None:
        """Add text that has arrived."""
        self._text += text

    def end(self) -> None:
        """Note that no more text follows."""
        self._is_ended = True

    def mark(self) -> None:
        """Begin a passage, which `unread` can take back."""
        self._read.clear()

    def unread(self) -> None:
        """Take back all that was read since `mark`."""
        self._text = "".join(self._read) + self._text
        self._read.clear()

    def at_end(self) -> Steps[bool]:
        """Return whether the text ends here, as soon as that is known."""
        while not self._text and not self._is_ended:
            yield None
        return not self._text

    def copy_until(self, *markers: str, make: Callable[[str], Part] = AnswerText) -> Steps[str]:
        """Yield the text before the first of the markers, in the parts that `make` makes of it. Return the marker,
        which is read; "" at the end of the text."""
        while True:
            found = [(start, -len(each), each) for each in markers if (start := self._text.find(each)) >= 0]
            start, _, marker = min(found, default=(len(self._text), 0, ""))
            if not self._is_ended:  # a marker that began earlier or is longer may still be completed
                partial = min((find_partial(self._text, each) for each in markers), default=start)
                start, marker = (partial, "") if partial <= start else (start, marker)
            if start:
                yield make(self._take(start))
            if marker:
                return self._take(len(marker))
            if self._is_ended:
                return ""
            yield None

    def take_until(self, *markers: str) -> Steps[tuple[str, str]]:
        """Return the text before the first of the markers, and the marker, both read. Raises UnexpectedText at the end
        of the text."""
        pieces: list[str] = []
        steps = self.copy_until(*markers)
        while True:
            try:
                part = next(steps)
            except StopIteration as stop:
                if not stop.value:
                    raise UnexpectedText from None
                return "".join(pieces), stop.value
            if isinstance(part, AnswerText):
                pieces.append(part.text)
            else:
                yield None

    def skip_space(self) -> Steps[str]:
        """Read white space and return the character after it, which is not read; "" at the end of the text."""
        while True:
            rest = self._text.lstrip(_SPACE)
            self._take(len(self._text) - len(rest))
            if rest or self._is_ended:
                return rest[:1]
            yield None

    def starts_with(self, text: str) -> Steps[bool]:
        """Return whether `text` is next, and read it if so."""
        while not self._is_ended and len(self._text) < len(text) and text.startswith(self._text):
            yield None
        if not self._text.startswith(text):
            return False
        self._take(len(text))
        return True

    def expect(self, text: str) -> Steps[None]:
        """Read `text`. Raises UnexpectedText where something else is next."""
        if not (yield from self.starts_with(text)):
            raise UnexpectedText

    def copy_json(self, make: Callable[[str], Part | None]) -> Steps[str]:
        """Read a JSON value and yield what `make` makes of its pieces. Return its text. Brackets and quotes decide
        where it ends; that its inside is valid is not checked. Raises UnexpectedText where the text ends within it."""
        pieces: list[str] = []
        scan = JsonScanner()
        while True:
            end = scan.find_end(self._text)
            if end is None and self._is_ended and scan.is_scalar:
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

    def copy_arguments(self, index: int) -> Steps[str]:
        """Read a JSON value and yield it as the arguments of the call number `index`. Return its text. Raises as
        `copy_json`."""
        return (yield from self.copy_json(lambda piece: CallArguments(index, piece)))

    def _take(self, length: int) -> str:
        taken, self._text = self._text[:length], self._text[length:]
        self._read.append(taken)
        return taken


class JsonScanner:
    """Finds the end of one JSON value in text that arrives in pieces. Each piece is scanned once."""

    def __init__(self) -> None:
        self._depth = 0
        self._is_in_string = self._is_escaped = False
        self.is_scalar = False
        """Whether the value is a number or a word, which ends before the character that follows it."""

    def find_end(self, piece: str) -> int | None:
        """Return the length of what the next piece has of the value, None where the value goes on after it."""
        for at, char in enumerate(piece):
            if self._is_in_string:
                if self._is_escaped:
                    self._is_escaped = False
                elif char == "\\":
                    self._is_escaped = True
                elif char == '"':
                    self._is_in_string = False
                    if not self._depth:
                        return at + 1
            elif char == '"' and not self.is_scalar:
                self._is_in_string = True
            elif self.is_scalar:
                if char in _ENDS_SCALAR:
                    return at
            elif char in "{[":
                self._depth += 1
            elif char in "}]":
                self._depth -= 1
                if self._depth <= 0:
                    return at + 1
            elif not self._depth:
                self.is_scalar = True
        return None


class PartReader(ABC):
    """Reads parts from a text that arrives in pieces. A subclass reads straight on, in `steps`."""

    def __init__(self) -> None:
        self.source = TextSource()
        self._steps = self.steps()

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
        return parts
