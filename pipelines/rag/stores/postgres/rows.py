"""Collections and their documents as rows: the values of columns, the words of texts, and the statements.

Functions on documents run in the caller's transaction.
"""

import json
import re
import time
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from psycopg.adapt import Dumper
from psycopg.pq import Format

from sluice.errors import ErrorCode, SluiceError
from sluice.pipelines.encoding import Vector, Vectors
from sluice.pipelines.rag.stores.postgres import schema
from sluice.pipelines.rag.types import (
    CollectionInfo,
    CollectionSpec,
    DocumentChunk,
    DocumentFormat,
    DocumentInfo,
    Hit,
    Metadata,
    StoredDocument,
)
from sluice.state.postgres import PostgresSession

MAX_QUERY_TERMS = 96
"""Most words, and most names, of one question; each costs one index lookup."""
_MAX_TERM_CHARS = 200
"""Longer terms are data, not words. Postgres' own limit is 2,046 bytes."""
_MAX_POSITION = 16_383
_WORD = re.compile(r"[^\W_]+")
_NAME = re.compile(r"(?<!\w)(?:\w++(?:[-.:/+]++\w++)++|(?=_*+[^\W_]++_|_++[^\W_])\w++|\w++[+#]++)")
"""Matches names like `str.partition`, `max_num_seqs`, `http-port`, `/v1/rag` and `C++`, in linear time."""
INFO_COLUMNS = "id, title, format, content_hash, num_chars, num_chunks, metadata, updated_s"
_UNSTORABLE = re.compile("[\0\ud800-\udfff]")
_BYTES_BEFORE_ELEMENTS = 4
_COLLECTION_COLUMNS = "id, name, encoder, dim, key_hashes, num_documents, num_chunks, num_terms, created_s"
_NUM_COLLECTION_COLUMNS = 9
_SELECT_COLLECTION = f"SELECT {_COLLECTION_COLUMNS} FROM sluice_rag_collections"
_INSERT_COLLECTION = f"""
INSERT INTO sluice_rag_collections (name, encoder, dim, key_hashes, created_s) VALUES (%s, %s, %s, %s, %s)
ON CONFLICT (name) DO NOTHING RETURNING {_COLLECTION_COLUMNS}
"""

_ROWS_PER_STATEMENT = 64
"""Rows that share the timeout of one statement: the vector index takes some milliseconds for each vector."""
_LOCK = "SELECT pg_advisory_xact_lock(hashtextextended(%s, %s))"
_DELETE_DOCUMENT = "DELETE FROM sluice_rag_documents_{id} WHERE id = %s RETURNING num_chunks, num_terms"
_INSERT_DOCUMENT = """
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
_SEARCH_LOCK = "hashtextextended('sluice_rag search', id)"
"""The key of a lock on all tables of a collection. Without it a search and a deletion, which lock several tables, could
deadlock."""


@dataclass(frozen=True, slots=True)
class SearchTerms:
    """The terms of a text in its order, with repetitions: its words, and the names in it as a whole. They consist of
    letters, digits and, in names, `-._:/+#`.

    Postgres stems the words and drops English stop words. It does not see punctuation: its own parser takes
    `str.partition` for a host name and `--http-port` for a number's sign.
    """

    words: Sequence[str]
    names: Sequence[str]

    @property
    def prose(self) -> str:
        """The words as text from which Postgres makes lexemes."""
        return " ".join(self.words)

    @property
    def tsvector(self) -> str:
        """The names as Postgres writes lexemes with positions, so that each counts as often as it occurs."""
        return " ".join(f"'{name}':{min(at, _MAX_POSITION)}" for at, name in enumerate(self.names, start=1))


def extract_terms(text: str) -> SearchTerms:
    """Extract the terms of a text, with case and forms of characters folded."""
    folded = unicodedata.normalize("NFKC", text).casefold()
    return SearchTerms(_drop_long(_WORD.findall(folded)), _drop_long(_NAME.findall(folded)))


def extract_query_terms(text: str) -> SearchTerms:
    """Extract the terms of a question, each once, the first MAX_QUERY_TERMS of a long one. Names are quoted lexemes."""
    terms = extract_terms(text)
    words = list(dict.fromkeys(terms.words))[:MAX_QUERY_TERMS]
    names = list(dict.fromkeys(terms.names))[:MAX_QUERY_TERMS]
    return SearchTerms(words, [f"'{name}'" for name in names])


def _drop_long(terms: list[str]) -> list[str]:
    return [term for term in terms if len(term) <= _MAX_TERM_CHARS]


class VectorDumper(Dumper):
    """Dumps a float32 array in pgvector's binary form: two 16-bit numbers, length and 0, then the elements."""

    format = Format.BINARY

    def dump(self, obj: Vector) -> bytes:
        return np.array([obj.size, 0], ">i2").tobytes() + obj.astype(">f4").tobytes()


def build_vector_dumper(oid: int) -> type[VectorDumper]:
    """Build the dumper for a database in which the type vector has this OID."""
    return type("VectorDumper", (VectorDumper,), {"oid": oid})


def decode_vector(sent: bytes) -> Vector:
    """Decode the result of `vector_send`."""
    return np.frombuffer(sent, ">f4", offset=_BYTES_BEFORE_ELEMENTS).astype(np.float32)


def make_storable(text: str) -> str:
    """Replace characters that Postgres cannot store, NUL and lone surrogates. Keeps the length."""
    return _UNSTORABLE.sub("\ufffd", text)


def parse_document_info(row: Sequence[Any]) -> DocumentInfo:
    """Build the info from a row of INFO_COLUMNS."""
    document_id, title, format, content_hash, num_chars, num_chunks, metadata, updated_s = row
    return DocumentInfo(
        document_id, title, DocumentFormat(format), content_hash, num_chars, num_chunks, metadata, updated_s
    )


def build_document_row(document: StoredDocument, num_chunks: int, num_terms: int) -> dict[str, Any]:
    info = document.info
    return {
        "id": make_storable(info.id),
        "title": make_storable(info.title),
        "format": info.format.value,
        "content_hash": info.content_hash,
        "num_chars": info.num_chars,
        "num_chunks": num_chunks,
        "num_terms": num_terms,
        "metadata": _encode_metadata(info.metadata),
        "updated_s": info.updated_s,
        "text": make_storable(document.text),
    }


def build_chunk_rows(document: StoredDocument, chunks: Sequence[DocumentChunk]) -> list[dict[str, Any]]:
    """Build one row for each chunk, without the document's key. Terms of title, heading and text stand apart."""
    title = extract_terms(document.info.title)
    return [_build_chunk_row(chunk, title) for chunk in chunks]


def _build_chunk_row(chunk: DocumentChunk, title: SearchTerms) -> dict[str, Any]:
    heading, text = extract_terms(chunk.heading), extract_terms(chunk.text)
    return {
        "index": chunk.index,
        "heading": make_storable(chunk.heading),
        "start": chunk.start,
        "end": chunk.end,
        "text": make_storable(chunk.text),
        "num_terms": len(title.words) + len(heading.words) + len(text.words),
        "title_words": title.prose,
        "title_names": title.tsvector,
        "heading_words": heading.prose,
        "heading_names": heading.tsvector,
        "text_words": text.prose,
        "text_names": text.tsvector,
    }


def parse_hit(row: Sequence[Any]) -> Hit:
    """Build a hit from a row that `search` selects. Its score is its similarity."""
    document_id, index, title, heading, start, end, text, metadata, similarity, sent = row
    vector = None if sent is None else decode_vector(sent)
    score = similarity or 0.0
    return Hit(document_id, index, title, heading, start, end, text, score, metadata, similarity, vector)


def _encode_metadata(metadata: Metadata) -> str:
    cleaned: Mapping[str, object] = {
        make_storable(key): make_storable(value) if isinstance(value, str) else value for key, value in metadata.items()
    }
    return json.dumps(cleaned, ensure_ascii=False)


@dataclass(frozen=True, slots=True)
class CollectionRow:
    """A collection's row. `id` is part of the names of its tables; `num_terms` counts the terms of all its chunks."""

    id: int
    num_terms: int
    info: CollectionInfo


async def list_collections(session: PostgresSession) -> list[CollectionInfo]:
    found = await (await session.execute(f"{_SELECT_COLLECTION} ORDER BY name")).fetchall()
    return [_parse_row(row).info for row in found]


async def read_collection(session: PostgresSession, name: str) -> CollectionInfo:
    """Return the collection's info. Raises NOT_FOUND."""
    return (await _find(session, name, f"{_SELECT_COLLECTION} WHERE name = %s")).info


async def _find_id(session: PostgresSession, name: str) -> int:
    return (await _find(session, name, f"{_SELECT_COLLECTION} WHERE name = %s")).id


async def find_for_search(session: PostgresSession, name: str) -> CollectionRow:
    """Return the collection's row, and keep it from deletion until the transaction ends. Raises NOT_FOUND."""
    lock = f"pg_advisory_xact_lock_shared({_SEARCH_LOCK})"
    return await _find(
        session, name, f"SELECT {_COLLECTION_COLUMNS}, {lock} FROM sluice_rag_collections WHERE name = %s"
    )


async def find_for_change(session: PostgresSession, name: str) -> CollectionRow:
    """Return the collection's row, and keep it from deletion until the transaction ends. Raises NOT_FOUND.

    Other transactions may change other documents in the meantime.
    """
    return await _find(session, name, f"{_SELECT_COLLECTION} WHERE name = %s FOR KEY SHARE")


async def _find(session: PostgresSession, name: str, statement: str) -> CollectionRow:
    row = await (await session.execute(statement, [make_storable(name)])).fetchone()
    if row is None:
        raise SluiceError(ErrorCode.NOT_FOUND, f"there is no collection '{name}'", param="collection")
    return _parse_row(row[:_NUM_COLLECTION_COLUMNS])


async def create_collection(session: PostgresSession, spec: CollectionSpec) -> CollectionInfo:
    """Create a collection with its tables, in a transaction. Raises ALREADY_EXISTS."""
    given = [make_storable(spec.name), make_storable(spec.encoder), spec.dim, list(spec.key_hashes), time.time()]
    async with session.transaction():
        row = await (await session.execute(_INSERT_COLLECTION, given)).fetchone()
        if row is None:
            message = f"there is a collection '{spec.name}' already"
            raise SluiceError(ErrorCode.ALREADY_EXISTS, message, param="collection")
        created = _parse_row(row)
        await session.execute(schema.collection_tables(created.id, spec.dim))
    return created.info


async def delete_collection(session: PostgresSession, name: str) -> None:
    """Delete a collection with its tables, in a transaction, once no change or search of it runs. Raises NOT_FOUND."""
    async with session.transaction():
        found = await _find(session, name, f"{_SELECT_COLLECTION} WHERE name = %s FOR UPDATE")
        await session.execute(
            f"SELECT pg_advisory_xact_lock({_SEARCH_LOCK}) FROM (VALUES (%s::bigint)) v (id)", [found.id]
        )
        await session.execute(schema.dropped_tables(found.id))
        await session.execute("DELETE FROM sluice_rag_collections WHERE id = %s", [found.id])


def _parse_row(row: Sequence[Any]) -> CollectionRow:
    id, name, encoder, dim, key_hashes, num_documents, num_chunks, num_terms, created_s = row
    spec = CollectionSpec(name, encoder, dim, tuple(key_hashes))
    return CollectionRow(id, num_terms, CollectionInfo(spec, num_documents, num_chunks, created_s))


@dataclass(frozen=True, slots=True)
class DocumentCounts:
    """The share of one document in its collection's counts."""

    documents: int = 0
    chunks: int = 0
    terms: int = 0


NO_COUNTS = DocumentCounts()


async def remove_document(session: PostgresSession, id: int, document_id: str) -> DocumentCounts:
    """Delete a document with its chunks. Returns NO_COUNTS if it does not exist.

    Locks the document's id until the transaction ends, so that no other transaction changes the document.
    """
    await session.execute(_LOCK, [f"sluice_rag {document_id}", id])
    row = await (await session.execute(_DELETE_DOCUMENT.format(id=id), [document_id])).fetchone()
    return NO_COUNTS if row is None else DocumentCounts(1, *row)


async def insert_document(
    session: PostgresSession, id: int, document: StoredDocument, chunk_rows: Sequence[dict[str, Any]], vectors: Vectors
) -> DocumentCounts:
    """Insert a document that does not exist."""
    counts = DocumentCounts(1, len(chunk_rows), sum(row["num_terms"] for row in chunk_rows))
    document_row = build_document_row(document, counts.chunks, counts.terms)
    row = await (await session.execute(_INSERT_DOCUMENT.format(id=id), document_row)).fetchone()
    assert row is not None
    for start in range(0, len(chunk_rows), _ROWS_PER_STATEMENT):
        batch = chunk_rows[start : start + _ROWS_PER_STATEMENT]
        await session.execute_many(_INSERT_CHUNK.format(id=id), [{**each, "document": row[0]} for each in batch])
        embedded = [(row[0], each["index"], vectors[start + offset]) for offset, each in enumerate(batch)]
        await session.execute_many(_INSERT_VECTOR.format(id=id), embedded)
    return counts


async def add_counts(session: PostgresSession, id: int, added: DocumentCounts, removed: DocumentCounts) -> None:
    """Change the collection's counts. Comes last in a transaction, since it blocks other changes of the collection."""
    change = {
        "documents": added.documents - removed.documents,
        "chunks": added.chunks - removed.chunks,
        "terms": added.terms - removed.terms,
    }
    await session.execute(_COUNT, {**change, "id": id})


async def read_document_info(session: PostgresSession, collection: str, document_id: str) -> DocumentInfo | None:
    id = await _find_id(session, collection)
    statement = f"SELECT {INFO_COLUMNS} FROM sluice_rag_documents_{id} WHERE id = %s"
    row = await (await session.execute(statement, [make_storable(document_id)])).fetchone()
    return None if row is None else parse_document_info(row)


async def read_document(session: PostgresSession, collection: str, document_id: str) -> StoredDocument | None:
    id = await _find_id(session, collection)
    statement = f"SELECT {INFO_COLUMNS}, text FROM sluice_rag_documents_{id} WHERE id = %s"
    row = await (await session.execute(statement, [make_storable(document_id)])).fetchone()
    return None if row is None else StoredDocument(parse_document_info(row[:-1]), row[-1])


async def list_documents(session: PostgresSession, collection: str, after: str, limit: int) -> list[DocumentInfo]:
    id = await _find_id(session, collection)
    statement = f"SELECT {INFO_COLUMNS} FROM sluice_rag_documents_{id} WHERE id > %s ORDER BY id LIMIT %s"
    found = await (await session.execute(statement, [make_storable(after), limit])).fetchall()
    return [parse_document_info(row) for row in found]
