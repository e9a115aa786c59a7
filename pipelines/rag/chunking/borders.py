"""Where a text may be cut, best places first."""

import re
from bisect import bisect_left, bisect_right
from collections.abc import Sequence

from pipelines.rag.types import ParsedDocument

_SENTENCE_END = re.compile(r"[.!?…][\"'’”)\]]*+\s++(?![a-z])|[。！？।][」』”’）]*+\s*+")
_LINE_END = re.compile(r"\n")


class Borders:
    """Places of a document, each list in order: `breaks`, its own; `sentences`, with the breaks; `lines`."""

    def __init__(self, document: ParsedDocument) -> None:
        self._text = document.text
        self.breaks = list(document.breaks)
        ends = [match.end() for match in _SENTENCE_END.finditer(self._text)]
        self.sentences = sorted({*ends, *self.breaks})
        self.lines = [match.end() for match in _LINE_END.finditer(self._text)]

    def word(self, earliest: int, latest: int) -> int | None:
        """The last place from `earliest` to `latest` that has white space before it."""
        text = self._text
        return next((place for place in range(latest, max(earliest, 1) - 1, -1) if text[place - 1].isspace()), None)

    def next_word(self, earliest: int, before: int) -> int | None:
        """The first one."""
        text = self._text
        places = range(max(earliest, 1), before)
        return next((place for place in places if text[place - 1].isspace() and not text[place].isspace()), None)


def last(places: Sequence[int], earliest: int, latest: int) -> int | None:
    """The last of the places from `earliest` to `latest`."""
    index = bisect_right(places, latest) - 1
    return places[index] if index >= 0 and places[index] >= earliest else None


def first(places: Sequence[int], earliest: int, before: int) -> int | None:
    """The first of the places from `earliest` on that lies before `before`."""
    index = bisect_left(places, earliest)
    return places[index] if index < len(places) and places[index] < before else None
