"""Collections in one SQLite file: their documents and searches, which run in a transaction of the caller's."""

import shutil
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import apsw
import msgspec
import numpy as np
import orjson

from sluice.errors import ErrorCode, SluiceError, invalid
from sluice.pipelines.encoding import Vectors
from sluice.pipelines.rag.stores.base import DocumentStore
from sluice.pipelines.rag.stores.sqlite import filter_sql, indexes, schema
from sluice.pipelines.rag.stores.sqlite.filter_sql import SqlFragment, select_documents
from sluice.pipelines.rag.stores.sqlite.indexes import Similarities, VectorSlot
from sluice.pipelines.rag.stores.sqlite.schema import SCHEMA, Ids
from sluice.pipelines.rag.types import (
    CandidateHits,
    CandidateQuery,
    CollectionInfo,
    CollectionSpec,
    DocumentChunk,
    DocumentFormat,
    DocumentInfo,
    Hit,
    Metadata,
    StoredDocument,
)
from sluice.run_folder import make_folder
from sluice.state.connections import FileConnections, FileLimits
from sluice.state.queries import Row, query_row, query_rows

_COLLECTION_COLUMNS = "name, encoder, dim, key_hashes, num_documents, num_chunks, created_s"
_DOCUMENT_COLUMNS = "name, title, format, content_hash, num_chars, num_chunks, metadata, updated_s"
_INSERT_DOCUMENT = (
    f"INSERT INTO documents (collection, text, {_DOCUMENT_COLUMNS}) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"
)
_INSERT_CHUNK = """
INSERT INTO chunks (id, segment, slot, heading, start_char, end_char, num_tokens, text) VALUES (?, ?, ?, ?, ?, ?, ?, ?)
"""
_Ranking = Sequence[tuple[int, float]]
"""Row ids of chunks with their scores, best first."""


def list_collections(connection: apsw.Connection) -> list[CollectionInfo]:
    found = query_rows(connection, f"SELECT {_COLLECTION_COLUMNS} FROM collections ORDER BY name")
    return [_parse_collection(row) for row in found]


def read_collection(connection: apsw.Connection, name: str) -> CollectionInfo:
    row = query_row(connection, f"SELECT {_COLLECTION_COLUMNS} FROM collections WHERE name = ?", (name,))
    if row is None:
        raise _not_found(name)
    return _parse_collection(row)


def create_collection(connection: apsw.Connection, spec: CollectionSpec) -> CollectionInfo:
    if query_row(connection, "SELECT 1 FROM collections WHERE name = ?", (spec.name,)):
        message = f"there is a collection '{spec.name}' already"
        raise SluiceError(ErrorCode.ALREADY_EXISTS, message, param="collection")
    connection.execute(
        "INSERT INTO collections (name, encoder, dim, key_hashes, created_s) VALUES (?, ?, ?, ?, ?)",
        (spec.name, spec.encoder, spec.dim, msgspec.json.encode(spec.key_hashes).decode(), time.time()),
    )
    indexes.create_index(connection, connection.last_insert_rowid())
    return read_collection(connection, spec.name)


def delete_collection(connection: apsw.Connection, name: str) -> None:
    collection, _ = find_collection(connection, name)
    indexes.drop_index(connection, collection)
    indexes.remove_all_vectors(connection, collection)
    condition = f"{schema.DOCUMENT_SQL.format('id')} IN (SELECT id FROM documents WHERE collection = ?)"
    connection.execute(f"DELETE FROM chunks WHERE {condition}", (collection,))
    connection.execute("DELETE FROM attributes WHERE collection = ?", (collection,))
    connection.execute("DELETE FROM documents WHERE collection = ?", (collection,))
    connection.execute("DELETE FROM collections WHERE id = ?", (collection,))


def find_collection(connection: apsw.Connection, name: str) -> tuple[int, int]:
    """Return the collection's row id and the length of its vectors. Raises NOT_FOUND."""
    row = query_row(connection, "SELECT id, dim FROM collections WHERE name = ?", (name,))
    if row is None:
        raise _not_found(name)
    return row[0], row[1]


def add_counts(connection: apsw.Connection, collection: int, num_documents: int, num_chunks: int) -> None:
    """Change the collection's counts, which every search reads: counting anew would take time for each document."""
    connection.execute(
        "UPDATE collections SET num_documents = num_documents + ?, num_chunks = num_chunks + ? WHERE id = ?",
        (num_documents, num_chunks, collection),
    )


def _parse_collection(row: Row) -> CollectionInfo:
    name, encoder, dim, key_hashes, num_documents, num_chunks, created_s = row
    spec = CollectionSpec(name, encoder, dim, msgspec.json.decode(key_hashes, type=tuple[str, ...]))
    return CollectionInfo(spec, num_documents, num_chunks, created_s)


def _not_found(name: str) -> SluiceError:
    return SluiceError(ErrorCode.NOT_FOUND, f"there is no collection '{name}'", param="collection")


def read_document_info(connection: apsw.Connection, collection: str, name: str) -> DocumentInfo | None:
    row = _select_document(connection, collection, name, _DOCUMENT_COLUMNS)
    return None if row is None else _parse_document(row)


def read_document(connection: apsw.Connection, collection: str, name: str) -> StoredDocument | None:
    row = _select_document(connection, collection, name, f"text, {_DOCUMENT_COLUMNS}")
    return None if row is None else StoredDocument(_parse_document(row[1:]), row[0])


def list_documents(connection: apsw.Connection, collection: str, after: str, limit: int) -> list[DocumentInfo]:
    collection_id, _ = find_collection(connection, collection)
    query = f"SELECT {_DOCUMENT_COLUMNS} FROM documents WHERE collection = ? AND name > ? ORDER BY name LIMIT ?"
    return [_parse_document(row) for row in query_rows(connection, query, (collection_id, after, limit))]


def put_document(
    connection: apsw.Connection,
    collection: str,
    document: StoredDocument,
    chunks: Sequence[DocumentChunk],
    vectors: Vectors,
) -> None:
    collection_id, dim = find_collection(connection, collection)
    if vectors.shape != (len(chunks), dim):
        expected = f"[{len(chunks)}, {dim}]: a vector of collection '{collection}' for each chunk"
        raise invalid("vectors", f"vectors must be {expected}, got {list(vectors.shape)}")
    if len(chunks) > schema.MAX_CHUNKS:
        message = f"a document may have {schema.MAX_CHUNKS} chunks, got {len(chunks)}"
        raise SluiceError(ErrorCode.TOO_LARGE, message, param="content")
    delete_document(connection, collection, document.info.id)
    row_id = _insert_document(connection, collection_id, document)
    _insert_attributes(connection, collection_id, row_id, document.info.metadata)
    _insert_chunks(connection, collection_id, row_id, document.info.title, chunks, vectors)
    add_counts(connection, collection_id, 1, len(chunks))


def delete_document(connection: apsw.Connection, collection: str, name: str) -> bool:
    """Delete the document with its chunks. Returns whether it existed."""
    collection_id, _ = find_collection(connection, collection)
    query = "SELECT id, num_chunks FROM documents WHERE collection = ? AND name = ?"
    row = query_row(connection, query, (collection_id, name))
    if row is None:
        return False
    row_id, num_chunks = row
    indexes.remove_document(connection, collection_id, row_id)
    indexes.remove_vectors(connection, row_id)
    connection.execute("DELETE FROM chunks WHERE id BETWEEN ? AND ?", schema.chunk_id_bounds(row_id))
    connection.execute("DELETE FROM attributes WHERE document = ?", (row_id,))
    connection.execute("DELETE FROM documents WHERE id = ?", (row_id,))
    add_counts(connection, collection_id, -1, -num_chunks)
    return True


def decode_metadata(text: str) -> Metadata:
    metadata: Metadata = orjson.loads(text)
    return metadata


def _insert_document(connection: apsw.Connection, collection: int, document: StoredDocument) -> int:
    info = document.info
    metadata = orjson.dumps(dict(info.metadata)).decode()
    columns = (info.id, info.title, info.format.value, info.content_hash, info.num_chars, info.num_chunks, metadata)
    connection.execute(_INSERT_DOCUMENT, (collection, document.text, *columns, info.updated_s))
    return int(connection.last_insert_rowid())


def _insert_attributes(connection: apsw.Connection, collection: int, document: int, metadata: Metadata) -> None:
    attributes = [(document, collection, key, *filter_sql.encode_scalar(value)) for key, value in metadata.items()]
    connection.executemany(
        "INSERT INTO attributes (document, collection, key, kind, value) VALUES (?, ?, ?, ?, ?)", attributes
    )


def _insert_chunks(
    connection: apsw.Connection,
    collection: int,
    document: int,
    title: str,
    chunks: Sequence[DocumentChunk],
    vectors: Vectors,
) -> None:
    first = schema.first_chunk_id(document)
    ids = np.arange(first, first + len(chunks), dtype=np.int64)
    slots = indexes.add_vectors(connection, collection, ids, np.ascontiguousarray(vectors, np.float32))
    for chunk_id, slot, chunk in zip(ids.tolist(), slots, chunks, strict=True):
        place = (chunk_id, slot.segment, slot.index)
        content = (chunk.heading, chunk.start, chunk.end, chunk.num_tokens, chunk.text)
        connection.execute(_INSERT_CHUNK, (*place, *content))
        indexes.add_chunk(connection, collection, chunk_id, chunk.text, chunk.heading, title)


def _select_document(connection: apsw.Connection, collection: str, name: str, columns: str) -> Row | None:
    collection_id, _ = find_collection(connection, collection)
    query = f"SELECT {columns} FROM documents WHERE collection = ? AND name = ?"
    return query_row(connection, query, (collection_id, name))


def _parse_document(row: Row) -> DocumentInfo:
    """Build the info from a row of `_DOCUMENT_COLUMNS`."""
    name, title, format_name, content_hash, num_chars, num_chunks, metadata, updated_s = row
    format, attributes = DocumentFormat(format_name), decode_metadata(metadata)
    return DocumentInfo(name, title, format, content_hash, num_chars, num_chunks, attributes, updated_s)


def find_candidates(connection: apsw.Connection, collection: str, query: CandidateQuery) -> CandidateHits:
    collection_id, dim = find_collection(connection, collection)
    if query.vector is not None and query.vector.shape != (dim,):
        expected = f"[{dim}], the length of the vectors of collection '{collection}'"
        raise invalid("vector", f"the query's vector must be {expected}, got {list(query.vector.shape)}")
    permitted = select_documents(collection_id, query.filter) if query.filter else None
    similarities = None
    if query.vector is not None:
        row_ids = _select_row_ids(connection, permitted) if permitted else None
        similarities = indexes.compare_vectors(connection, collection_id, query.vector, row_ids)
    by_vector = similarities.best(query.limit) if similarities else []
    by_text = indexes.rank_chunks(connection, collection_id, query.text, query.limit, permitted) if query.text else []
    return _read_candidates(connection, by_vector, by_text, similarities, dim if query.with_vectors else None)


def _select_row_ids(connection: apsw.Connection, permitted: SqlFragment) -> Ids:
    found = query_rows(connection, permitted.text, permitted.values)
    return np.fromiter((row_id for (row_id,) in found), np.int64)


def _read_candidates(
    connection: apsw.Connection,
    by_vector: _Ranking,
    by_text: _Ranking,
    similarities: Similarities | None,
    dim: int | None,
) -> CandidateHits:
    """Read the chunks of both rankings, with their vectors if `dim`, the vectors' length, is given."""
    found = list({chunk for chunk, _ in (*by_vector, *by_text)})
    cosines = similarities.select(found) if similarities else {}
    hits = dict(_read_hits(connection, found, cosines, dim))
    return CandidateHits(_add_scores(by_vector, hits), _add_scores(by_text, hits))


def _add_scores(ranking: _Ranking, hits: Mapping[int, Hit]) -> list[Hit]:
    return [replace(hits[chunk], score=score) for chunk, score in ranking]


_ROWS = f"""
    SELECT chunks.id, segment, slot, name, title, heading, start_char, end_char, chunks.text, metadata
    FROM json_each(?) AS found
    JOIN chunks ON chunks.id = found.value
    JOIN documents ON documents.id = {schema.DOCUMENT_SQL.format("chunks.id")}
"""


def _read_hits(
    connection: apsw.Connection, chunks: Sequence[int], cosines: Mapping[int, float], dim: int | None
) -> Iterable[tuple[int, Hit]]:
    """Yield the chunks by row id, without their scores."""
    found = query_rows(connection, _ROWS, (orjson.dumps(chunks).decode(),))
    for chunk, segment, slot, name, title, heading, start, end, text, metadata in found:
        index, attributes = schema.chunk_index(chunk), decode_metadata(metadata)
        vector = None if dim is None else indexes.read_vector(connection, VectorSlot(segment, slot), dim)
        similarity = cosines.get(chunk)
        yield chunk, Hit(name, index, title, heading, start, end, text, 0.0, attributes, similarity, vector)


class SqliteStore(DocumentStore):
    """Searches a file exactly. Several processes may use the file at once; missing folders above it are created.

    One thread writes and a few read, so that searches do not wait for changes. Without `path`, the store has a
    temporary file that is deleted when it closes.
    """

    def __init__(self, path: Path | None, limits: FileLimits | None = None) -> None:
        self.name = f"SQLite store {path or ':memory:'}"
        self.is_shared = path is not None
        self._folder = make_folder("rag") if path is None else None
        path = path or Path(self._folder or "", "rag.sqlite")
        self._connections = FileConnections(path.absolute(), self.name, SCHEMA, limits or FileLimits())

    async def open(self) -> None:
        self._connections.start()
        await self._connections.read(lambda connection: None)

    async def close(self) -> None:
        await self._connections.close()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    async def collections(self) -> list[CollectionInfo]:
        return await self._connections.read(list_collections)

    async def collection(self, name: str) -> CollectionInfo:
        return await self._connections.read(read_collection, name)

    async def create_collection(self, spec: CollectionSpec) -> CollectionInfo:
        return await self._connections.write(create_collection, spec)

    async def delete_collection(self, name: str) -> None:
        await self._connections.write(delete_collection, name)

    async def put_document(
        self, collection: str, document: StoredDocument, chunks: Sequence[DocumentChunk], vectors: Vectors
    ) -> None:
        await self._connections.write(put_document, collection, document, chunks, vectors)

    async def delete_document(self, collection: str, document_id: str) -> bool:
        return await self._connections.write(delete_document, collection, document_id)

    async def document(self, collection: str, document_id: str) -> StoredDocument | None:
        return await self._connections.read(read_document, collection, document_id)

    async def documents(self, collection: str, after: str = "", limit: int = 100) -> list[DocumentInfo]:
        return await self._connections.read(list_documents, collection, after, limit)

    async def document_info(self, collection: str, document_id: str) -> DocumentInfo | None:
        return await self._connections.read(read_document_info, collection, document_id)

    async def candidates(self, collection: str, query: CandidateQuery) -> CandidateHits:
        return await self._connections.read(find_candidates, collection, query)
