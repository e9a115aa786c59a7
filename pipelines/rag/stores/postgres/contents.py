"""Documents put into, taken out of and read from the tables of a collection. Within the caller's transaction."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pipelines.rag.stores.postgres import rows
from pipelines.rag.stores.postgres.connections import Session
from pipelines.rag.types import DocumentInfo, StoredDocument, Vectors

_ROWS_AT_ONCE = 64
"""Sent in one go: the index takes some milliseconds for each vector, and all have the time of one statement."""

_LOCK = "SELECT pg_advisory_xact_lock(hashtextextended(%s, %s))"
_DELETE = "DELETE FROM sluice_rag_documents_{id} WHERE id = %s RETURNING num_chunks, num_terms"
_INSERT = """
INSERT INTO sluice_rag_documents_{id}
    (id, title, format, content_hash, num_chars, num_chunks, num_terms, metadata, updated_s, text)
VALUES (%(id)s, %(title)s, %(format)s, %(content_hash)s, %(num_chars)s, %(num_chunks)s, %(num_terms)s,
        %(metadata)s::jsonb, %(updated_s)s, %(text)s)
RETURNING key
"""
_INSERT_CHUNK = """
INSERT INTO sluice_rag_chunks_{id} (document, index, heading, start_char, end_char, text, num_terms, terms)
VALUES (%(document)s, %(index)s, %(heading)s, %(start)s, %(end)s, %(text)s, %(num_terms)s,
        setweight(to_tsvector('english', %(title_words)s::text) || %(title_names)s::tsvector, 'A')
        || setweight(to_tsvector('english', %(heading_words)s::text) || %(heading_names)s::tsvector, 'B')
        || to_tsvector('english', %(text_words)s::text) || %(text_names)s::tsvector)
"""
_INSERT_VECTOR = "INSERT INTO sluice_rag_vectors_{id} (document, index, embedding) VALUES (%s, %s, %s)"
_COUNT = """
UPDATE sluice_rag_collections SET num_documents = num_documents + %(documents)s, num_chunks = num_chunks + %(chunks)s,
       num_terms = num_terms + %(terms)s
WHERE id = %(id)s
"""


@dataclass(frozen=True, slots=True)
class Size:
    """What a document adds to its collection's counts."""

    documents: int = 0
    chunks: int = 0
    terms: int = 0


NOTHING = Size()


async def remove(session: Session, id: int, document_id: str) -> Size:
    """With its chunks; NOTHING where it is not there. Until the transaction ends nobody else changes that document."""
    await session.execute(_LOCK, [f"sluice_rag {document_id}", id])
    row = await (await session.execute(_DELETE.format(id=id), [document_id])).fetchone()
    return NOTHING if row is None else Size(1, *row)


async def insert(
    session: Session, id: int, document: StoredDocument, chunk_rows: Sequence[dict[str, Any]], vectors: Vectors
) -> Size:
    """A document that is not there now."""
    size = Size(1, len(chunk_rows), sum(row["num_terms"] for row in chunk_rows))
    given = rows.document_row(document, size.chunks, size.terms)
    row = await (await session.execute(_INSERT.format(id=id), given)).fetchone()
    assert row is not None
    for start in range(0, len(chunk_rows), _ROWS_AT_ONCE):
        some = chunk_rows[start : start + _ROWS_AT_ONCE]
        await session.execute_many(_INSERT_CHUNK.format(id=id), [{**each, "document": row[0]} for each in some])
        embedded = [(row[0], each["index"], vectors[start + at]) for at, each in enumerate(some)]
        await session.execute_many(_INSERT_VECTOR.format(id=id), embedded)
    return size


async def count(session: Session, id: int, added: Size, removed: Size) -> None:
    """Last in a transaction: until its end, no other document of the collection can be counted."""
    change = {
        "documents": added.documents - removed.documents,
        "chunks": added.chunks - removed.chunks,
        "terms": added.terms - removed.terms,
    }
    await session.execute(_COUNT, {**change, "id": id})


async def info(session: Session, id: int, document_id: str) -> DocumentInfo | None:
    statement = f"SELECT {rows.INFO_COLUMNS} FROM sluice_rag_documents_{id} WHERE id = %s"
    row = await (await session.execute(statement, [document_id])).fetchone()
    return None if row is None else rows.document_info(row)


async def document(session: Session, id: int, document_id: str) -> StoredDocument | None:
    statement = f"SELECT {rows.INFO_COLUMNS}, text FROM sluice_rag_documents_{id} WHERE id = %s"
    row = await (await session.execute(statement, [document_id])).fetchone()
    return None if row is None else StoredDocument(rows.document_info(row[:-1]), row[-1])


async def page(session: Session, id: int, after: str, limit: int) -> list[DocumentInfo]:
    statement = f"SELECT {rows.INFO_COLUMNS} FROM sluice_rag_documents_{id} WHERE id > %s ORDER BY id LIMIT %s"
    found = await (await session.execute(statement, [after, limit])).fetchall()
    return [rows.document_info(row) for row in found]
