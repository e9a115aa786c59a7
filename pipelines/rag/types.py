"""What collections hold, what is asked of them and what they answer: frozen values."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np
import numpy.typing as npt

from pipelines.rag.filters import Filter
from pipelines.text.citations import Source

Vectors = npt.NDArray[np.float32]
"""[n, dim] float32, each row of length 1."""
Vector = npt.NDArray[np.float32]
"""[dim] float32, of length 1."""

Metadata = Mapping[str, str | int | float | bool | None]
"""What a document's owner says of it, and filters look at."""


class DocumentFormat(StrEnum):
    TEXT = "text"
    MARKDOWN = "markdown"
    HTML = "html"
    PDF = "pdf"


@dataclass(frozen=True, slots=True)
class Heading:
    """A heading of a parsed document: its section begins at character `start` of the text; `level` from 1."""

    start: int
    level: int
    text: str


@dataclass(frozen=True, slots=True)
class ParsedDocument:
    """A document as plain text, with its structure. Offsets of headings, chunks and sources are into `text`.

    `breaks` are the starts of paragraphs, list items, code blocks and table rows, in order: where a chunk may end.
    `title` is "" where the document does not say.
    """

    text: str
    title: str = ""
    headings: Sequence[Heading] = ()
    breaks: Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class Chunk:
    """A piece of a document: `text` is the document's text from `start` to `end`, in characters.

    `heading` is the path of headings above it, outermost first, joined by " > "; "" above the first heading.
    `num_tokens` are the encoder's.
    """

    index: int
    text: str
    heading: str
    start: int
    end: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class DocumentInfo:
    """A document as collections list it. `content_hash` is `upload.content_hash_of`; `updated_s` in Unix seconds."""

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
    """What a collection is made with, and keeps.

    `encoder` is the name of the model whose vectors it holds, `dim` their length. `key_hashes` of its owners'
    keys (`pipelines/rag/keys.py`); empty: open to whoever reaches the server.
    """

    name: str
    encoder: str
    dim: int
    key_hashes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class CollectionInfo:
    """A collection as it is now."""

    spec: CollectionSpec
    num_documents: int
    num_chunks: int
    created_s: float


@dataclass(frozen=True, slots=True)
class Hit:
    """A chunk that was found. `score` rises with relevance; its scale is that of the search that found it.

    A vector search's is the cosine similarity, BM25's is above 0 without a bound, a fused one's is reciprocal rank
    fusion's, a reranker's its own. `similarity` keeps the cosine through all of them; None where it was not worked out.
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
        """The same chunk in two rankings."""
        return self.document_id, self.chunk_index


@dataclass(frozen=True, slots=True)
class CandidateQuery:
    """What a store is asked in one snapshot: the chunks nearest to `vector`, and those that match `text` best.

    Either may be None. At most `limit` of each, best first. `with_vectors`: hits carry theirs.
    """

    vector: Vector | None
    text: str | None
    limit: int
    filter: Filter | None = None
    with_vectors: bool = False


@dataclass(frozen=True, slots=True)
class Candidates:
    """Both rankings of one snapshot, best first."""

    by_vector: Sequence[Hit] = ()
    by_text: Sequence[Hit] = ()


class RetrievalMode(StrEnum):
    VECTOR = "vector"
    BM25 = "bm25"
    HYBRID = "hybrid"


def source_of(hit: Hit) -> Source:
    """Without an id."""
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
