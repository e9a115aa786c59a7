"""Parses a document's bytes into text and structure, in a thread or in the sandbox."""

import asyncio
import math
from dataclasses import dataclass

from pipelines.rag.documents.readers import read_document
from pipelines.rag.documents.sandbox import read_in_sandbox
from pipelines.rag.documents.sandbox_worker import SandboxLimits
from pipelines.rag.types import DocumentFormat, Heading, ParsedDocument
from sluice.errors import ErrorCode, SluiceError, invalid

_MAX_THREAD_BYTES = {DocumentFormat.MARKDOWN: 256 << 10, DocumentFormat.HTML: 16 << 10, DocumentFormat.PDF: 0}
"""Largest document of each format that a thread reads, which saves 0.1 s for the start of a process.

A thread can be neither killed nor limited, and shares the interpreter's lock. Markdown's parser is Python; HTML of a
few hundred kilobytes can expand to gigabytes of elements, and takes time quadratic in its depth. Plain text of any size
is read in a thread: one regular expression splits it.
"""


@dataclass(frozen=True, slots=True)
class ParseLimits:
    """Limits for parsing one document.

    `max_bytes` bounds the document, and the characters of its text. `timeout_s` of processor time and `memory_bytes`
    of memory bound the sandbox process, which small documents other than PDFs do not need.
    """

    max_bytes: int = 64 << 20
    timeout_s: float = 60.0
    memory_bytes: int = 1 << 30


async def parse_document(content: bytes, format: DocumentFormat, limits: ParseLimits) -> ParsedDocument:
    """Parse a document without blocking the event loop. PDFs and large documents are parsed in a sandbox process.

    Raises SluiceError INVALID (param "content") for a document that cannot be read or has no text, and TOO_LARGE for
    one beyond the limits.
    """
    if len(content) > limits.max_bytes:
        message = f"the document has {len(content)} bytes, and at most {limits.max_bytes} are taken"
        raise SluiceError(ErrorCode.TOO_LARGE, message, param="content")
    if not content:
        raise invalid("content", "the document is empty")
    if len(content) <= _MAX_THREAD_BYTES.get(format, limits.max_bytes):
        extract = await asyncio.to_thread(read_document, format.value, content, limits.max_bytes)
    else:
        # The kernel limits processor time in whole seconds.
        cpu_s = max(1, math.ceil(limits.timeout_s))
        sandbox_limits = SandboxLimits(cpu_s, limits.memory_bytes, limits.max_bytes)
        extract = await read_in_sandbox(format.value, content, sandbox_limits)
    headings = tuple(Heading(*heading) for heading in extract.headings)
    return ParsedDocument(extract.text, extract.title, headings, extract.breaks)
