"""What format a document is in."""

import codecs
import re
from pathlib import PurePosixPath

from pipelines.rag.documents.encoding import decoded
from pipelines.rag.types import DocumentFormat
from sluice.errors import SluiceError, invalid

TAKEN = "text (UTF-8, or UTF-16 with a byte order mark), Markdown, HTML, PDF"
_PDF_MARK = b"%PDF-"
_PDF_MARK_WITHIN = 1024
"""Readers take a PDF whose mark stands anywhere in this many first bytes."""

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


def format_of(content_type: str, filename: str, content: bytes) -> DocumentFormat:
    """The format of a document: by its first bytes (PDF), content type, file name; else by what its bytes are.

    text/plain and application/octet-stream say nothing of the format: senders give them to what they do not know.
    Raises SluiceError INVALID (param "format") for what is none of them, naming what came and what is taken.
    """
    if _PDF_MARK in content[:_PDF_MARK_WITHIN]:
        return DocumentFormat.PDF
    media_type = content_type.partition(";")[0].strip().lower()
    suffix = PurePosixPath(filename).suffix.lower()
    return _TYPES.get(media_type) or _SUFFIXES.get(suffix) or _format_of_bytes(media_type, filename, content)


def _format_of_bytes(media_type: str, filename: str, content: bytes) -> DocumentFormat:
    """Of source code, data and what has no name."""
    if _HTML_START.match(content.removeprefix(codecs.BOM_UTF8)):
        return DocumentFormat.HTML
    try:
        decoded(content)
    except SluiceError as error:
        came = ", ".join(part for part in (media_type, repr(filename[:120]) if filename else "") if part)
        came = came or "a document without content type and file name"
        raise invalid("format", f"{came} is of no format that is taken ({TAKEN}): {error.message}") from None
    return DocumentFormat.TEXT
