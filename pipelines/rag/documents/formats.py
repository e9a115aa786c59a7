"""Detects a document's format from its content type, file name and bytes."""

import codecs
import re
from pathlib import PurePosixPath

from sluice.errors import SluiceError, invalid
from sluice.pipelines.rag.documents.extract import UTF_8, decode_text
from sluice.pipelines.rag.types import DocumentFormat

_ACCEPTED = "text (UTF-8, or UTF-16 with a byte order mark), Markdown, HTML, PDF"
_PDF_MARK = b"%PDF-"
_PDF_MARK_WITHIN = 1024
"""Readers accept a PDF whose mark stands anywhere in this many first bytes."""
_PDF_HEADER = re.compile(rb"^%PDF-\d\.\d\s*$", re.MULTILINE)
_PDF_TRAILER, _PDF_TRAILER_WITHIN = b"%%EOF", 1024

_TYPES = {
    "application/pdf": DocumentFormat.PDF,
    "application/x-pdf": DocumentFormat.PDF,
    "application/xhtml+xml": DocumentFormat.HTML,
    "text/html": DocumentFormat.HTML,
    "text/markdown": DocumentFormat.MARKDOWN,
    "text/x-markdown": DocumentFormat.MARKDOWN,
}
_SUFFIXES = {
    ".htm": DocumentFormat.HTML,
    ".html": DocumentFormat.HTML,
    ".markdown": DocumentFormat.MARKDOWN,
    ".md": DocumentFormat.MARKDOWN,
    ".pdf": DocumentFormat.PDF,
    ".rst": DocumentFormat.TEXT,
    ".txt": DocumentFormat.TEXT,
    ".xhtml": DocumentFormat.HTML,
}
_HTML_START = re.compile(rb"\s*(?:<!doctype\s+html|<html[\s>])", re.IGNORECASE)


def detect_format(content_type: str, filename: str, content: bytes, encoding: str = "") -> DocumentFormat:
    """Detect the format by the content type, the file name, or else the bytes themselves.

    text/plain and application/octet-stream are ignored: clients send them for files whose type they do not know. A PDF
    is known by its bytes whatever it is called, unless it could be the text that it is called. `encoding` is the
    charset that came with the content type, "" for none. Raises SluiceError INVALID (param "format"), which names what
    came and what is accepted, for any other format.
    """
    media_type = content_type.partition(";")[0].strip().lower()
    called = _TYPES.get(media_type) or _SUFFIXES.get(PurePosixPath(filename).suffix.lower())
    is_called_text = called is not None or media_type.startswith("text/") or bool(encoding)
    if called is not DocumentFormat.PDF and _is_pdf(content, encoding or UTF_8, is_called_text):
        return DocumentFormat.PDF
    return called or _detect_by_bytes(media_type, filename, content, encoding or UTF_8)


def _is_pdf(content: bytes, encoding: str, is_called_text: bool) -> bool:
    """Whether the bytes are a PDF: they have its mark, and are not text that speaks of PDFs.

    The mark begins what is called text, and may come after other bytes in what is not called anything.
    """
    head = content[:_PDF_MARK_WITHIN]
    if not (head.lstrip().startswith(_PDF_MARK) if is_called_text else _PDF_MARK in head):
        return False
    if not _is_text(content, encoding):
        return is_called_text or not _HTML_START.match(content)
    is_whole = _PDF_HEADER.search(head) is not None and _PDF_TRAILER in content[-_PDF_TRAILER_WITHIN:]
    return is_whole and not is_called_text


def _is_text(content: bytes, encoding: str) -> bool:
    try:
        decode_text(content, encoding)
    except SluiceError:
        return False
    return True


def _detect_by_bytes(media_type: str, filename: str, content: bytes, encoding: str) -> DocumentFormat:
    """Tell HTML from plain text, for content whose type and name do not say."""
    if _HTML_START.match(content.removeprefix(codecs.BOM_UTF8)):
        return DocumentFormat.HTML
    try:
        decode_text(content, encoding)
    except SluiceError as error:
        given = ", ".join(part for part in (media_type, repr(filename[:120]) if filename else "") if part)
        given = given or "a document without content type and file name"
        raise invalid("format", f"{given} is of no format that is taken ({_ACCEPTED}): {error.message}") from None
    return DocumentFormat.TEXT
