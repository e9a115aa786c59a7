"""From the bytes of a document to its text and structure."""

from dataclasses import dataclass

from pipelines.rag.types import DocumentFormat, ParsedDocument


@dataclass(frozen=True, slots=True)
class ParseLimits:
    """What parsing one document may take: `timeout_s` of processor time, `memory_bytes` of its process (PDF)."""

    max_bytes: int = 64 << 20
    timeout_s: float = 60.0
    memory_bytes: int = 1 << 30


def format_of(content_type: str, filename: str, content: bytes) -> DocumentFormat:
    """The format of a document: by its first bytes (PDF), content type, file name; else TEXT where it is UTF-8.

    Raises SluiceError INVALID (param "format") for what is none of them, naming what came and what is taken.
    """
    raise NotImplementedError


async def parse_document(content: bytes, format: DocumentFormat, limits: ParseLimits) -> ParsedDocument:
    """Does not block the event loop. PDFs are parsed in a process of their own, which a broken one takes down alone.

    Raises SluiceError INVALID (param "content") for what cannot be read or has no text, TOO_LARGE beyond the limits.
    """
    raise NotImplementedError
