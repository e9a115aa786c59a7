"""Plain text, and source code as such."""

import re

from pipelines.rag.documents.encoding import decoded
from pipelines.rag.documents.extract import Extract

_PARAGRAPH = re.compile(r"\n[^\S\n]*+\n\s*+")


def read(content: bytes) -> Extract:
    """Paragraphs are what blank lines separate."""
    text = decoded(content)
    return Extract(text, breaks=[match.end() for match in _PARAGRAPH.finditer(text) if match.end() < len(text)])
