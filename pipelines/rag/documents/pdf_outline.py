"""Where a PDF's headings are."""

from collections.abc import Sequence
from dataclasses import dataclass

from pipelines.rag.documents.pdf_lines import Page

_NUMBER_CHARS = 16
"""How much longer than the bookmark's the heading on the page may be: its number, dots, the page's."""


@dataclass(frozen=True, slots=True)
class Bookmark:
    """An entry of the outline: `page` from 0, `level` from 1."""

    page: int
    level: int
    title: str


def page_headings(pages: Sequence[Page], starts: Sequence[int]) -> list[tuple[int, int, str]]:
    """For a document without an outline: a citation should at least say the page."""
    numbered = enumerate(zip(pages, starts, strict=True), 1)
    return [(start, 1, f"Page {number}") for number, (page, start) in numbered if page.text]


def headings_of(
    bookmarks: Sequence[Bookmark], pages: Sequence[Page], starts: Sequence[int]
) -> list[tuple[int, int, str]]:
    """Each bookmark at the line of its page that has its title; at the start of the page where none has."""
    headings = [
        (starts[bookmark.page] + _place(bookmark.title, pages[bookmark.page].text), bookmark.level, bookmark.title)
        for bookmark in bookmarks
    ]
    return sorted(headings, key=lambda heading: heading[0])


def _place(title: str, page: str) -> int:
    wanted = _squeezed(title)
    start = 0
    for line in page.split("\n"):
        found = _squeezed(line)
        if wanted and wanted in found and len(found) <= len(wanted) + _NUMBER_CHARS:
            return start
        start += len(line) + 1
    return 0


def _squeezed(text: str) -> str:
    return "".join(filter(str.isalnum, text.casefold()))
