"""Lengths in tokens of a text whose tokens are known."""

from bisect import bisect_left, bisect_right
from collections.abc import Sequence

MAX_TOKEN_CHARS = 16
"""What one token may stand for. A tokenizer gives up on a word of a hundred letters and makes one token of it, however
long it is, and none of white space: without this bound a chunk could be of any length."""


class TokenMeasure:
    """Counts the tokens of any piece of a text in logarithmic time."""

    def __init__(self, starts: Sequence[int], num_chars: int) -> None:
        self._starts = _without_gaps(starts, num_chars)
        self._num_chars = num_chars

    def count(self, start: int, end: int) -> int:
        """Tokens that begin in the piece, and the one in whose midst `start` may lie. 0 for an empty piece."""
        if start >= end:
            return 0
        first = bisect_left(self._starts, start)
        return bisect_left(self._starts, end) - first + self._is_inside(first, start)

    def reach(self, start: int, num_tokens: int) -> int:
        """The furthest end of a piece of `num_tokens` at most; past `start` even where one character has more."""
        first = bisect_left(self._starts, start)
        end = self._at(first + num_tokens - self._is_inside(first, start))
        return end if end > start else self._at(bisect_right(self._starts, start))

    def back(self, end: int, num_tokens: int) -> int:
        """The earliest token start of a piece of `num_tokens` at most that ends there."""
        if num_tokens == 0:
            return end
        return self._starts[max(bisect_left(self._starts, end) - num_tokens, 0)]

    def _at(self, index: int) -> int:
        return self._starts[index] if index < len(self._starts) else self._num_chars

    def _is_inside(self, first: int, start: int) -> bool:
        """Whether `start` is no token's; `first` is the index of the first one from there."""
        return first == len(self._starts) or self._starts[first] != start


def _without_gaps(starts: Sequence[int], num_chars: int) -> list[int]:
    """With more starts where tokens are longer than one may be, and one at 0."""
    filled = [0]
    for start in (*starts, num_chars):
        filled += range(filled[-1] + MAX_TOKEN_CHARS, start, MAX_TOKEN_CHARS)
        if 0 < start < num_chars:
            filled.append(start)
    return filled
