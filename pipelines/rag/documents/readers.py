"""Chooses the reader for a document's format. Plain text, source code included, is read here."""

import re

from sluice.errors import invalid
from sluice.pipelines.rag.documents.extract import UTF_8, Extract, decode_text

_PARAGRAPH = re.compile(r"\n[^\S\n]*+\n\s*+")


def read_document(format: str, content: bytes, max_chars: int, encoding: str = "") -> Extract:
    """Extract text and structure from a document; `format` is the value of a `DocumentFormat`. Raises SluiceError.

    `encoding` is what the sender says that it is in, "" if nothing is said: a name that `find_encoding` returned.

    Blocks, so it runs in a thread or in the sandbox. Each parser is imported only where it is used: a process that
    lives for one document should not pay for the others.
    """
    match format:
        case "text":
            extract = read_text(content, encoding or UTF_8)
        case "markdown":
            from sluice.pipelines.rag.documents.markdown import read_markdown

            extract = read_markdown(content, encoding or UTF_8)
        case "html":
            from sluice.pipelines.rag.documents.html import read_html

            extract = read_html(content, encoding)
        case "pdf":
            from sluice.pipelines.rag.documents.pdf import read_pdf

            extract = read_pdf(content, max_chars)
        case _:
            raise AssertionError(f"no reader for {format!r}")
    if not extract.text or extract.text.isspace():
        raise invalid("content", f"the {format} document has no text")
    return extract


def read_text(content: bytes, encoding: str = UTF_8) -> Extract:
    """Decode plain text. Blank lines separate paragraphs."""
    text = decode_text(content, encoding)
    return Extract(text, breaks=[match.end() for match in _PARAGRAPH.finditer(text) if match.end() < len(text)])
