"""Reads PDFs that have a text layer: lines, paragraphs, and headings from the outline.

Runs only in the sandbox process: PDFium is C++, and a PDF may come from anywhere.
"""

import ctypes
import re
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Any

import pypdfium2
import pypdfium2.raw as pdfium

from sluice.errors import ErrorCode, SluiceError, invalid
from sluice.pipelines.rag.documents.extract import Extract, format_label

_MAX_BOOKMARKS = 20_000
_NO_TITLE = re.compile(r"untitled.*|microsoft word - .*|.*\.(?:docx?|dvi|indd|odt|pdf|pptx?|rtf|tex)", re.IGNORECASE)
"""Matches what programs write into the title field of a document without a title."""
_HYPHENATED = re.compile(r"(?<![^\W\d_])[^\W\d_]++-[^\W\d_]++")
_LINE_HYPHEN = "\ufffe"
"""PDFium's character for a hyphen at the end of a line, which it joins with the next line."""
_CUT_WORD = re.compile(rf"(?<![^\W\d_])([^\W\d_]++){_LINE_HYPHEN}([^\W\d_]++)")
_UNPRINTABLE = re.compile(r"[\x00-\x08\x0b-\x1f\x7f\ufffe\uffff]")
_LINE = re.compile(r"[^\s][^\r\n]*(?<!\s)")
_PARAGRAPH_GAP = 1.35
"""A paragraph starts where two lines are this many times farther apart than lines usually are on the page."""
_NUMBER_CHARS = 16
"""Most characters by which a heading on the page may exceed its bookmark: section number, dots, page number."""


@dataclass(frozen=True, slots=True)
class PdfLine:
    """A line of a page. `top` and `bottom` are the baselines, in points, of its first and its last character.

    They differ where PDFium joined several lines of the page at hyphens.
    """

    text: str
    top: float
    bottom: float


@dataclass(frozen=True, slots=True)
class PdfPage:
    """The text of a page. `paragraphs` are the offsets in `text` at which paragraphs start."""

    text: str
    paragraphs: Sequence[int]


@dataclass(frozen=True, slots=True)
class Bookmark:
    """An entry of the outline: `page` counts from 0, `level` from 1."""

    page: int
    level: int
    title: str


def read_pdf(content: bytes, max_chars: int) -> Extract:
    """Extract the text of all pages. Headings come from the outline; without one, each page has a heading "Page 1" etc.

    Line breaks stay; words cut at the end of a line are joined. Raises INVALID for a broken or encrypted PDF and for
    one without text, TOO_LARGE for more than `max_chars` characters.
    """
    with _open(content) as document:
        title = format_label(document.get_metadata_value("Title"))
        bookmarks = list(_bookmarks(document))
        pages = _read_pages(document, max_chars)
    if not any(page.text for page in pages):
        raise invalid("content", "the PDF has no text layer: its pages are images, or empty; it needs OCR first")
    starts, text = _join_pages(pages)
    return Extract(
        text,
        "" if _NO_TITLE.fullmatch(title) else title,
        _locate_headings(bookmarks, pages, starts) if bookmarks else _page_headings(pages, starts),
        [start + offset for start, page in zip(starts, pages, strict=True) for offset in page.paragraphs],
    )


def _open(content: bytes) -> pypdfium2.PdfDocument:
    try:
        return pypdfium2.PdfDocument(content)
    except pypdfium2.PdfiumError as error:
        match error.err_code:
            case pdfium.FPDF_ERR_PASSWORD | pdfium.FPDF_ERR_SECURITY:
                fault = "the PDF is encrypted, and needs a password to be read"
            case pdfium.FPDF_ERR_SUCCESS:
                fault = "the PDF has no pages"
            case _:
                fault = "the document is no PDF, or a broken or truncated one"
        raise invalid("content", fault) from None


def _bookmarks(document: pypdfium2.PdfDocument) -> Iterator[Bookmark]:
    """Yield the bookmarks that have a title and lead to a page."""
    toc: Iterator[Any] = document.get_toc()
    for _, bookmark in zip(range(_MAX_BOOKMARKS), toc, strict=False):
        title, target = format_label(bookmark.get_title()), bookmark.get_dest()
        page = target.get_index() if target else None
        if title and page is not None and page < len(document):
            yield Bookmark(page, bookmark.level + 1, title)


def _read_pages(document: pypdfium2.PdfDocument, max_chars: int) -> list[PdfPage]:
    lines_by_page: list[list[PdfLine]] = []
    chars_left = max_chars
    for number in range(len(document)):
        lines = _read_page(document, number)
        chars_left -= sum(len(line.text) for line in lines)
        if chars_left < 0:
            raise SluiceError(
                ErrorCode.TOO_LARGE, f"the PDF has more than {max_chars} characters of text", param="content"
            )
        lines_by_page.append(lines)
    hyphenated = {word for lines in lines_by_page for line in lines for word in _HYPHENATED.findall(line.text)}
    return [_join_lines(lines, hyphenated) for lines in lines_by_page]


def _read_page(document: pypdfium2.PdfDocument, number: int) -> list[PdfLine]:
    try:
        page = document[number]
        text_page = page.get_textpage()
    except pypdfium2.PdfiumError:
        raise invalid("content", f"page {number + 1} of the PDF is broken") from None
    try:
        return _read_lines(text_page)
    finally:  # else memory grows with every page
        text_page.close()
        page.close()


def _read_lines(text_page: Any) -> list[PdfLine]:
    """Return the lines of a page that are not blank, in PDFium's order."""
    text = text_page.get_text_range()
    lines = []
    num_pairs = 0  # characters so far that PDFium, which counts in UTF-16, counts twice
    for match in _LINE.finditer(text):
        line = match[0]
        first = match.start() + num_pairs
        num_pairs += sum(char > "\uffff" for char in line) if not line.isascii() else 0
        last = match.end() - 1 + num_pairs
        lines.append(PdfLine(line, _baseline(text_page, first), _baseline(text_page, last)))
    return lines


def _baseline(text_page: Any, offset: int) -> float:
    """Return the baseline of the character at an offset of the page's text, which counts in UTF-16."""
    index = pdfium.FPDFText_GetCharIndexFromTextIndex(text_page, offset)
    x, y = ctypes.c_double(), ctypes.c_double()
    pdfium.FPDFText_GetCharOrigin(text_page, index, x, y)
    return y.value


def _join_lines(lines: Sequence[PdfLine], hyphenated: Set[str]) -> PdfPage:
    """Join the lines of a page. A word in `hyphenated` keeps its hyphen at the end of a line.

    `hyphenated` are the words that the document also writes with a hyphen within a line.
    """
    parts: list[str] = []
    paragraphs: list[int] = []
    length = 0
    for line, is_first in zip(lines, _paragraph_starts(lines), strict=True):
        text = _clean(line.text, hyphenated)
        if not text:
            continue
        gap = "" if not parts else "\n\n" if is_first else "\n"
        if is_first or not parts:
            paragraphs.append(length + len(gap))
        parts.append(gap + text)
        length += len(gap) + len(text)
    return PdfPage("".join(parts), paragraphs)


def _paragraph_starts(lines: Sequence[PdfLine]) -> Iterator[bool]:
    """Yield for each line whether the gap above it is wider than usual on this page."""
    drops = [above.bottom - line.top for above, line in pairwise(lines)]
    falling = [drop for drop in drops if drop > 0]
    usual = median(falling) if falling else 0.0
    yield from (drop > _PARAGRAPH_GAP * usual for drop in ([float("inf")] if lines else []) + drops)


def _clean(text: str, hyphenated: Set[str]) -> str:
    def join(word: re.Match[str]) -> str:
        with_hyphen = f"{word[1]}-{word[2]}"
        is_cut = word[2][0].islower() and with_hyphen not in hyphenated
        return word[1] + word[2] if is_cut else with_hyphen

    text = _CUT_WORD.sub(join, text).replace(_LINE_HYPHEN, "-")
    return _UNPRINTABLE.sub("", text).strip()


def _join_pages(pages: list[PdfPage]) -> tuple[list[int], str]:
    """Return the offset at which each page starts, and the text of all pages."""
    starts, parts, length = [], [], 0
    for page in pages:
        starts.append(length)
        if page.text:
            parts.append(page.text)
            length += len(page.text) + 2
    text = "\n\n".join(parts)
    return [min(start, len(text)) for start in starts], text


def _page_headings(pages: Sequence[PdfPage], starts: Sequence[int]) -> list[tuple[int, int, str]]:
    """Make each page a section, for a document without an outline: a citation should at least name the page."""
    numbered = enumerate(zip(pages, starts, strict=True), 1)
    return [(start, 1, f"Page {number}") for number, (page, start) in numbered if page.text]


def _locate_headings(
    bookmarks: Sequence[Bookmark], pages: Sequence[PdfPage], starts: Sequence[int]
) -> list[tuple[int, int, str]]:
    """Place each bookmark at the line of its page with the same title, or at the start of the page if none has it."""
    headings = [
        (starts[bookmark.page] + _find_line(bookmark.title, pages[bookmark.page].text), bookmark.level, bookmark.title)
        for bookmark in bookmarks
    ]
    return sorted(headings, key=lambda heading: heading[0])


def _find_line(title: str, page: str) -> int:
    title = _squeeze(title)
    start = 0
    for line in page.split("\n"):
        candidate = _squeeze(line)
        if title and title in candidate and len(candidate) <= len(title) + _NUMBER_CHARS:
            return start
        start += len(line) + 1
    return 0


def _squeeze(text: str) -> str:
    return "".join(filter(str.isalnum, text.casefold()))
