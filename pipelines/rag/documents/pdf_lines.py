"""From the characters of a PDF's page to its lines and paragraphs."""

import ctypes
import re
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Any

import pypdfium2.raw as pdfium

_LINE_HYPHEN = "\ufffe"
"""What PDFium has for a hyphen at the end of a line, which it joins with the next."""
_CUT_WORD = re.compile(rf"(?<![^\W\d_])([^\W\d_]++){_LINE_HYPHEN}([^\W\d_]++)")
_UNPRINTABLE = re.compile(r"[\x00-\x08\x0b-\x1f\x7f\ufffe\uffff]")
_LINE = re.compile(r"[^\s][^\r\n]*(?<!\s)")
_PARAGRAPH_GAP = 1.35
"""How many times as far apart as lines are on the page two lines are that paragraphs lie between."""


@dataclass(frozen=True, slots=True)
class Line:
    """Baselines of its first and last character, in points: it may be several on the page, joined at hyphens."""

    text: str
    top: float
    bottom: float


@dataclass(frozen=True, slots=True)
class Page:
    """`paragraphs`: where they start in `text`."""

    text: str
    paragraphs: Sequence[int]


def lines_of(text_page: Any) -> list[Line]:
    """The lines of a page that are not blank, as PDFium orders them."""
    text = text_page.get_text_range()
    lines = []
    num_pairs = 0
    """Characters so far that PDFium counts as two."""
    for match in _LINE.finditer(text):
        line = match[0]
        first = match.start() + num_pairs
        num_pairs += sum(char > "\uffff" for char in line) if not line.isascii() else 0
        last = match.end() - 1 + num_pairs
        lines.append(Line(line, _baseline(text_page, first), _baseline(text_page, last)))
    return lines


def page_of(lines: Sequence[Line], hyphenated: Set[str]) -> Page:
    """`hyphenated`: words that the document writes with a hyphen elsewhere, and that keep it at the end of a line."""
    parts: list[str] = []
    paragraphs: list[int] = []
    length = 0
    for line, is_first in zip(lines, _starts_of_paragraphs(lines), strict=True):
        text = _cleaned(line.text, hyphenated)
        if not text:
            continue
        gap = "" if not parts else "\n\n" if is_first else "\n"
        if is_first or not parts:
            paragraphs.append(length + len(gap))
        parts.append(gap + text)
        length += len(gap) + len(text)
    return Page("".join(parts), paragraphs)


def _starts_of_paragraphs(lines: Sequence[Line]) -> Iterator[bool]:
    """Whether each line lies further below the one before it than lines do on this page."""
    drops = [above.bottom - line.top for above, line in pairwise(lines)]
    falling = [drop for drop in drops if drop > 0]
    usual = median(falling) if falling else 0.0
    yield from (drop > _PARAGRAPH_GAP * usual for drop in ([float("inf")] if lines else []) + drops)


def _cleaned(text: str, hyphenated: Set[str]) -> str:
    def joined(word: re.Match[str]) -> str:
        with_hyphen = f"{word[1]}-{word[2]}"
        is_cut = word[2][0].islower() and with_hyphen not in hyphenated
        return word[1] + word[2] if is_cut else with_hyphen

    text = _CUT_WORD.sub(joined, text).replace(_LINE_HYPHEN, "-")
    return _UNPRINTABLE.sub("", text).strip()


def _baseline(text_page: Any, place: int) -> float:
    """Of the character at a place of the page's text, in UTF-16."""
    index = pdfium.FPDFText_GetCharIndexFromTextIndex(text_page, place)
    x, y = ctypes.c_double(), ctypes.c_double()
    pdfium.FPDFText_GetCharOrigin(text_page, index, x, y)
    return y.value
