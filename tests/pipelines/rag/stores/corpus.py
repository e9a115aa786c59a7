"""Small documents for the stores' tests, and the hits that a search over them must find."""

from collections.abc import Iterable, Sequence

import numpy as np

from sluice.pipelines.encoding import Vector, Vectors
from sluice.pipelines.rag.filters import Condition, Filter, Operator, Scalar
from sluice.pipelines.rag.stores.base import DocumentStore
from sluice.pipelines.rag.types import (
    CandidateHits,
    CandidateQuery,
    CollectionSpec,
    DocumentChunk,
    DocumentFormat,
    DocumentInfo,
    Hit,
    Metadata,
    StoredDocument,
)

DIM = 8
SPEC = CollectionSpec("docs", "query_encoder", DIM)


def unit_vectors(num: int, seed: int, dim: int = DIM) -> Vectors:
    """Draw vectors [num, dim] of length 1, the same for the same seed."""
    drawn = np.random.default_rng(seed).normal(size=(num, dim)).astype(np.float32)
    return np.asarray(drawn / np.linalg.norm(drawn, axis=1, keepdims=True), np.float32)


def unit_vector(seed: int, dim: int = DIM) -> Vector:
    return np.asarray(unit_vectors(1, seed, dim)[0], np.float32)


def document_of(
    document_id: str,
    passages: Sequence[str],
    *,
    title: str = "",
    heading: str = "",
    metadata: Metadata | None = None,
    content_hash: str = "0" * 64,
) -> tuple[StoredDocument, list[DocumentChunk]]:
    """Build a document whose chunks are `passages`, one to a line."""
    text = "\n".join(passages)
    chunks: list[DocumentChunk] = []
    start = 0
    for index, passage in enumerate(passages):
        chunks.append(DocumentChunk(index, passage, heading, start, start + len(passage), len(passage.split())))
        start += len(passage) + 1
    info = DocumentInfo(
        id=document_id,
        title=title or document_id,
        format=DocumentFormat.MARKDOWN,
        content_hash=content_hash,
        num_chars=len(text),
        num_chunks=len(chunks),
        metadata=metadata or {},
        updated_s=1_700_000_000.25,
    )
    return StoredDocument(info, text), chunks


async def put(
    store: DocumentStore,
    document_id: str,
    passages: Sequence[str],
    *,
    collection: str = "docs",
    vectors: Vectors | None = None,
    title: str = "",
    heading: str = "",
    metadata: Metadata | None = None,
) -> StoredDocument:
    """Put a document into the store. Without `vectors`, each chunk's is drawn from its place in the document."""
    document, chunks = document_of(document_id, passages, title=title, heading=heading, metadata=metadata)
    rows = unit_vectors(len(passages), len(document_id)) if vectors is None else vectors
    await store.put_document(collection, document, chunks, rows)
    return document


async def nearest(
    store: DocumentStore,
    vector: Vector,
    *,
    limit: int = 10,
    filter: Filter | None = None,
    collection: str = "docs",
    with_vectors: bool = False,
) -> Sequence[Hit]:
    found = await store.candidates(collection, CandidateQuery(vector, None, limit, filter, with_vectors))
    assert not found.by_text
    return found.by_vector


async def matching(
    store: DocumentStore, text: str, *, limit: int = 10, filter: Filter | None = None, collection: str = "docs"
) -> Sequence[Hit]:
    found: CandidateHits = await store.candidates(collection, CandidateQuery(None, text, limit, filter))
    assert not found.by_vector
    return found.by_text


def ids(hits: Iterable[Hit]) -> list[str]:
    return [hit.document_id for hit in hits]


def where(key: str, operator: Operator, value: Scalar | tuple[Scalar, ...]) -> Filter:
    return Filter((Condition(key, operator, value),))
