"""From the bytes of a document to its text and structure."""

import asyncio
from dataclasses import dataclass

from pipelines.rag.documents.extract import Extract
from pipelines.rag.documents.formats import format_of
from pipelines.rag.documents.process import bounds_of, read_in_process
from pipelines.rag.documents.readers import read
from pipelines.rag.types import DocumentFormat, Heading, ParsedDocument
from sluice.errors import ErrorCode, SluiceError, invalid

__all__ = ["ParseLimits", "format_of", "parse_document"]

_BYTES_IN_THREAD = {DocumentFormat.MARKDOWN: 256 << 10, DocumentFormat.HTML: 16 << 10, DocumentFormat.PDF: 0}
"""Up to this size a thread reads the document, which saves a process's start (0.1 s).

A thread can be neither ended nor bounded, and shares the interpreter's lock: Markdown's parser is Python; HTML of a few
hundred kilobytes can unfold to gigabytes of elements, and takes time quadratic in its depth. Plain text is split by one
regular expression, whatever its size.
"""


@dataclass(frozen=True, slots=True)
class ParseLimits:
    """What parsing one document may take: `timeout_s` of processor time, `memory_bytes` of its process.

    `max_bytes` of the document, and as many characters of text that come out of it. Small documents that are no PDF
    need no process.
    """

    max_bytes: int = 64 << 20
    timeout_s: float = 60.0
    memory_bytes: int = 1 << 30


async def parse_document(content: bytes, format: DocumentFormat, limits: ParseLimits) -> ParsedDocument:
    """Does not block the event loop. PDFs are parsed in a process of their own, which a broken one takes down alone.

    So are large documents of other formats. Raises SluiceError INVALID (param "content") for what cannot be read or has
    no text, TOO_LARGE beyond the limits.
    """
    if len(content) > limits.max_bytes:
        message = f"the document has {len(content)} bytes, and at most {limits.max_bytes} are taken"
        raise SluiceError(ErrorCode.TOO_LARGE, message, param="content")
    if not content:
        raise invalid("content", "the document is empty")
    if len(content) <= _BYTES_IN_THREAD.get(format, limits.max_bytes):
        extract = await asyncio.to_thread(read, format.value, content, limits.max_bytes)
    else:
        bounds = bounds_of(limits.timeout_s, limits.memory_bytes, limits.max_bytes)
        extract = await read_in_process(format.value, content, bounds)
    return _parsed(extract)


def _parsed(extract: Extract) -> ParsedDocument:
    headings = tuple(Heading(*heading) for heading in extract.headings)
    return ParsedDocument(extract.text, extract.title, headings, extract.breaks)
