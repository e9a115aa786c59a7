"""Detects a document's format from its content type, file name and bytes."""

import codecs
import re
from pathlib import PurePosixPath

from pipelines.rag.documents.extract import decode_text
from pipelines.rag.types import DocumentFormat
from sluice.errors import SluiceError, invalid

_ACCEPTED = "text (UTF-8, or UTF-16 with a byte order mark), Markdown, HTML, PDF"
_PDF_MARK = b"%PDF-"
_PDF_MARK_WITHIN = 1024
"""Readers accept a PDF whose mark stands anywhere in this many first bytes."""

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
    ".xhtml": DocumentFormat.HTML,
}
_HTML_START = re.compile(rb"\s*(?:<!doctype\s+html|<html[\s>])", re.IGNORECASE)


def detect_format(content_type: str, filename: str, content: bytes) -> DocumentFormat:
    """Detect the format by the first bytes (PDF), the content type, the file name, or else the bytes themselves.

    text/plain and application/octet-stream are ignored: clients send them for files whose type they do not know.
    Raises SluiceError INVALID (param "format"), which names what came and what is accepted, for any other format.
    """
    if _PDF_MARK in content[:_PDF_MARK_WITHIN]:
        return DocumentFormat.PDF
    media_type = content_type.partition(";")[0].strip().lower()
    suffix = PurePosixPath(filename).suffix.lower()
    return _TYPES.get(media_type) or _SUFFIXES.get(suffix) or _detect_by_bytes(media_type, filename, content)


def _detect_by_bytes(media_type: str, filename: str, content: bytes) -> DocumentFormat:
    """Tell HTML from plain text, for content whose type and name do not say."""
    if _HTML_START.match(content.removeprefix(codecs.BOM_UTF8)):
        return DocumentFormat.HTML
    try:
        decode_text(content)
    except SluiceError as error:
        given = ", ".join(part for part in (media_type, repr(filename[:120]) if filename else "") if part)
        given = given or "a document without content type and file name"
        raise invalid("format", f"{given} is of no format that is taken ({_ACCEPTED}): {error.message}") from None
    return DocumentFormat.TEXT
