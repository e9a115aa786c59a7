"""Replacing pieces of a text without losing track of its places."""

from bisect import bisect_right
from collections.abc import Sequence
from typing import NamedTuple


class Edit(NamedTuple):
    """`text` instead of the characters from `start` to `end`."""

    start: int
    end: int
    text: str


class Edits:
    """`source` with the edits done: `text`. They are in order and do not overlap."""

    def __init__(self, source: str, edits: Sequence[Edit]) -> None:
        parts: list[str] = []
        self._ends = [0]
        self._shifts = [0]
        for edit in edits:
            parts += source[self._ends[-1] : edit.start], edit.text
            self._shifts.append(self._shifts[-1] + len(edit.text) - (edit.end - edit.start))
            self._ends.append(edit.end)
        parts.append(source[self._ends[-1] :])
        self.text = "".join(parts)

    def moved(self, place: int) -> int:
        """Where a place of the source that is not inside of an edit has come to."""
        return place + self._shifts[bisect_right(self._ends, place) - 1]
