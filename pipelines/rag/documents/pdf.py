"""PDFs that have text. To be read in a process of its own alone: PDFium is C++, and a PDF may come from anywhere."""

import re
from collections.abc import Iterator
from typing import Any

import pypdfium2
import pypdfium2.raw as pdfium

from pipelines.rag.documents.extract import Extract, as_label
from pipelines.rag.documents.pdf_lines import Line, Page, lines_of, page_of
from pipelines.rag.documents.pdf_outline import Bookmark, headings_of, page_headings
from sluice.errors import ErrorCode, SluiceError, invalid

_MAX_BOOKMARKS = 20_000
_NO_TITLE = re.compile(r"untitled.*|microsoft word - .*|.*\.(?:docx?|dvi|indd|odt|pdf|pptx?|rtf|tex)", re.IGNORECASE)
"""What programs put in the place of a title."""
_HYPHENATED = re.compile(r"(?<![^\W\d_])[^\W\d_]++-[^\W\d_]++")


def read(content: bytes, max_chars: int) -> Extract:
    """Headings are the outline's, else "Page 1" and so on. Lines stay, words that were cut at their ends are joined."""
    with _opened(content) as document:
        title = as_label(document.get_metadata_value("Title"))
        bookmarks = list(_bookmarks(document))
        pages = _pages(document, max_chars)
    if not any(page.text for page in pages):
        raise invalid("content", "the PDF has no text layer: its pages are images, or empty; it needs OCR first")
    starts, text = _joined(pages)
    return Extract(
        text,
        "" if _NO_TITLE.fullmatch(title) else title,
        headings_of(bookmarks, pages, starts) if bookmarks else page_headings(pages, starts),
        [start + place for start, page in zip(starts, pages, strict=True) for place in page.paragraphs],
    )


def _opened(content: bytes) -> pypdfium2.PdfDocument:
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


def _pages(document: pypdfium2.PdfDocument, max_chars: int) -> list[Page]:
    lines_of_pages: list[list[Line]] = []
    chars_left = max_chars
    for number in range(len(document)):
        lines = _lines(document, number)
        chars_left -= sum(len(line.text) for line in lines)
        if chars_left < 0:
            raise SluiceError(
                ErrorCode.TOO_LARGE, f"the PDF has more than {max_chars} characters of text", param="content"
            )
        lines_of_pages.append(lines)
    hyphenated = {word for lines in lines_of_pages for line in lines for word in _HYPHENATED.findall(line.text)}
    return [page_of(lines, hyphenated) for lines in lines_of_pages]


def _lines(document: pypdfium2.PdfDocument, number: int) -> list[Line]:
    try:
        page = document[number]
        text_page = page.get_textpage()
    except pypdfium2.PdfiumError:
        raise invalid("content", f"page {number + 1} of the PDF is broken") from None
    try:
        return lines_of(text_page)
    finally:  # or memory would grow with every page
        text_page.close()
        page.close()


def _bookmarks(document: pypdfium2.PdfDocument) -> Iterator[Bookmark]:
    """Those that have a title and lead to a page."""
    toc: Iterator[Any] = document.get_toc()
    for _, bookmark in zip(range(_MAX_BOOKMARKS), toc, strict=False):
        title, target = as_label(bookmark.get_title()), bookmark.get_dest()
        page = target.get_index() if target else None
        if title and page is not None and page < len(document):
            yield Bookmark(page, bookmark.level + 1, title)


def _joined(pages: list[Page]) -> tuple[list[int], str]:
    """The text of all pages, and where each page starts in it."""
    starts, parts, length = [], [], 0
    for page in pages:
        starts.append(length)
        if page.text:
            parts.append(page.text)
            length += len(page.text) + 2
    text = "\n\n".join(parts)
    return [min(start, len(text)) for start in starts], text
