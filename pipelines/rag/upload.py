"""A document on its way into a collection."""

import hashlib
from dataclasses import dataclass, field

import orjson

from pipelines.rag.types import DocumentFormat, Metadata
from sluice.errors import invalid

_MAX_ID_CHARS = 512


@dataclass(frozen=True, slots=True)
class Upload:
    """A document as it came. `title` "" takes the document's own, else its id."""

    id: str
    content: bytes
    format: DocumentFormat
    title: str = ""
    metadata: Metadata = field(default_factory=dict)


def content_hash_of(upload: Upload) -> str:
    """Of all that makes the document what it is. Clients compute it too: docs/rag.md says how."""
    digest = hashlib.sha256(upload.content)
    if upload.title or upload.metadata:
        digest.update(orjson.dumps([upload.title, dict(upload.metadata)], option=orjson.OPT_SORT_KEYS))
    return digest.hexdigest()


def check_id(document_id: str) -> None:
    """Raises INVALID for what no document can be called."""
    if not document_id or len(document_id) > _MAX_ID_CHARS or not document_id.isprintable():
        raise invalid(
            "id", f"a document's id must be 1 to {_MAX_ID_CHARS} printable characters, got {document_id[:80]!r}"
        )
