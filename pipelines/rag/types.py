"""Values of retrieval: collections and their owners' keys, uploads, documents, chunks, a store's queries and hits."""

import hashlib
import hmac
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType

import orjson

from sluice.errors import ErrorCode, SluiceError, invalid
from sluice.pipelines.encoding import Vector
from sluice.pipelines.rag.filters import Filter
from sluice.pipelines.text.citations import Source
from sluice.pipelines.text.types import OWNER_KEY, OWNER_KEY_HEADER

_MAX_ID_CHARS = 512

Metadata = Mapping[str, str | int | float | bool | None]
"""Attributes that a client gives a document, for filters to match."""
MAX_KEY_CHARS = 256


class DocumentFormat(StrEnum):
    TEXT = "text"
    MARKDOWN = "markdown"
    HTML = "html"
    PDF = "pdf"


@dataclass(frozen=True, slots=True)
class Heading:
    """A heading of a parsed document. Its section begins at character `start` of the text; `level` counts from 1."""

    start: int
    level: int
    text: str


@dataclass(frozen=True, slots=True)
class ParsedDocument:
    """A document as plain text with its structure. Offsets of headings, chunks and sources count characters of `text`.

    `breaks` are the starts of paragraphs, list items, code blocks and table rows, ascending: a chunk may end there.
    `title` is "" if the document has none.
    """

    text: str
    title: str = ""
    headings: Sequence[Heading] = ()
    breaks: Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class DocumentChunk:
    """A piece of a document: the characters `start` to `end` of its text.

    `heading` is the path of headings above the chunk, outermost first, joined by " > "; "" before the first heading.
    `num_tokens` counts the encoder's tokens.
    """

    index: int
    text: str
    heading: str
    start: int
    end: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class DocumentInfo:
    """A document without its text. `content_hash` comes from `hash_content`; `updated_s` is in Unix seconds."""

    id: str
    title: str
    format: DocumentFormat
    content_hash: str
    num_chars: int
    num_chunks: int
    metadata: Metadata = field(default_factory=dict)
    updated_s: float = 0.0


@dataclass(frozen=True, slots=True)
class StoredDocument:
    """A document with its parsed text."""

    info: DocumentInfo
    text: str


@dataclass(frozen=True, slots=True)
class CollectionSpec:
    """The properties that a collection keeps from its creation on.

    `encoder` names the model whose vectors the collection holds, `dim` is their length. `key_hashes` are hashes of
    its owner keys (`pipelines/rag/types.py`); a collection without any is open to all clients of the server.
    """

    name: str
    encoder: str
    dim: int
    key_hashes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class CollectionInfo:
    """A collection with its current counts. `created_s` is in Unix seconds."""

    spec: CollectionSpec
    num_documents: int
    num_chunks: int
    created_s: float


@dataclass(frozen=True, slots=True)
class Hit:
    """A chunk that a search found. `score` rises with relevance, on the scale of the stage that gave it.

    Vector search scores by cosine similarity, BM25 above 0 without a bound, fusion by reciprocal ranks, a reranker on
    its own scale. `similarity` keeps the cosine through all stages; None if it was not computed.
    """

    document_id: str
    chunk_index: int
    title: str
    heading: str
    start: int
    end: int
    text: str
    score: float
    metadata: Metadata = field(default_factory=dict)
    similarity: float | None = None
    vector: Vector | None = field(default=None, repr=False, compare=False)

    @property
    def key(self) -> tuple[str, int]:
        """Identifies the chunk across rankings."""
        return self.document_id, self.chunk_index


@dataclass(frozen=True, slots=True)
class CandidateQuery:
    """Asks a store for the `limit` chunks nearest to `vector` and the `limit` best matches of `text`.

    Either may be None. With `with_vectors` the hits carry their vectors.
    """

    vector: Vector | None
    text: str | None
    limit: int
    filter: Filter | None = None
    with_vectors: bool = False


@dataclass(frozen=True, slots=True)
class CandidateHits:
    """The rankings by vector and by text, best first, both from one snapshot of the store."""

    by_vector: Sequence[Hit] = ()
    by_text: Sequence[Hit] = ()


class RetrievalMode(StrEnum):
    VECTOR = "vector"
    BM25 = "bm25"
    HYBRID = "hybrid"


def build_source(hit: Hit) -> Source:
    """Build the source that cites the hit, without an id."""
    return Source(
        document=hit.document_id,
        title=hit.title,
        heading=hit.heading,
        start=hit.start,
        end=hit.end,
        score=round(float(hit.score), 6),
        similarity=None if hit.similarity is None else round(float(hit.similarity), 4),
        metadata=dict(hit.metadata),
        text=hit.text,
    )


@dataclass(frozen=True, slots=True)
class Upload:
    """An unparsed document. An empty `title` stands for the title found in the document, else for its id.

    `encoding` is what the sender says that the content is in: a name of the Encoding Standard in lower case, "" if
    nothing was said.
    """

    id: str
    content: bytes
    format: DocumentFormat
    title: str = ""
    metadata: Metadata = field(default_factory=dict)
    encoding: str = ""


def hash_content(upload: Upload) -> str:
    """Return the hash of content, title, metadata and encoding. Clients compute the same hash (docs/rag.md)."""
    digest = hashlib.sha256(upload.content)
    digest.update(hashed_fields(upload.title, upload.metadata, upload.encoding))
    return digest.hexdigest()


def hashed_fields(title: str = "", metadata: Metadata = MappingProxyType({}), encoding: str = "") -> bytes:
    """Return what follows a document's bytes in its hash: nothing for one that has none of these, or is UTF-8."""
    fields = [title, dict(metadata), *([] if encoding in ("", "utf-8") else [encoding])]
    return orjson.dumps(fields, option=orjson.OPT_SORT_KEYS) if any(fields) else b""


def check_id(document_id: str) -> None:
    """Check a document's id. Raises INVALID."""
    if not document_id or len(document_id) > _MAX_ID_CHARS or not document_id.isprintable():
        raise invalid(
            "id", f"a document's id must be 1 to {_MAX_ID_CHARS} printable characters, got {document_id[:80]!r}"
        )


def check_new_key(key: str) -> None:
    """Check a new owner key. Raises SluiceError INVALID for one that some protocol could not carry."""
    if len(key) > MAX_KEY_CHARS or not key.isascii() or not key.isprintable():
        message = f"an owner key must be at most {MAX_KEY_CHARS} printable ASCII characters ({OWNER_KEY_HEADER})"
        raise SluiceError(ErrorCode.INVALID, message, param=OWNER_KEY)


def hash_key(key: str) -> str:
    """Return the hash that stores keep instead of the key. Keys are long and random: one round of SHA-256 is enough."""
    return hashlib.sha256(b"sluice collection key\0" + key.encode()).hexdigest()


def grants_access(spec: CollectionSpec, key: str) -> bool:
    """Whether `key`, "" for none, grants access to the collection. Takes constant time."""
    if not spec.key_hashes:
        return True
    given = hash_key(key)
    return bool(sum(hmac.compare_digest(given, each) for each in spec.key_hashes))


def check_access(spec: CollectionSpec, key: str) -> None:
    """Check that `key` grants access to the collection. Raises SluiceError FORBIDDEN, which never repeats the key."""
    if grants_access(spec, key):
        return
    fault = (
        f"the {OWNER_KEY_HEADER} given is not one of its keys"
        if key
        else f"send its key in the header {OWNER_KEY_HEADER}"
    )
    message = f"collection '{spec.name}' has an owner: {fault} (request parameter {OWNER_KEY} in the v2 protocol)"
    raise SluiceError(ErrorCode.FORBIDDEN, message, param="collection")
