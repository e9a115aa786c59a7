"""A document as a client uploads it, before it is parsed."""

import hashlib
from dataclasses import dataclass, field

import orjson

from pipelines.rag.types import DocumentFormat, Metadata
from sluice.errors import invalid

_MAX_ID_CHARS = 512


@dataclass(frozen=True, slots=True)
class Upload:
    """An unparsed document. An empty `title` stands for the title found in the document, else for its id."""

    id: str
    content: bytes
    format: DocumentFormat
    title: str = ""
    metadata: Metadata = field(default_factory=dict)


def hash_content(upload: Upload) -> str:
    """Return the hash of content, title and metadata. Clients compute the same hash (docs/rag.md)."""
    digest = hashlib.sha256(upload.content)
    if upload.title or upload.metadata:
        digest.update(orjson.dumps([upload.title, dict(upload.metadata)], option=orjson.OPT_SORT_KEYS))
    return digest.hexdigest()


def check_id(document_id: str) -> None:
    """Check a document's id. Raises INVALID."""
    if not document_id or len(document_id) > _MAX_ID_CHARS or not document_id.isprintable():
        raise invalid(
            "id", f"a document's id must be 1 to {_MAX_ID_CHARS} printable characters, got {document_id[:80]!r}"
        )
