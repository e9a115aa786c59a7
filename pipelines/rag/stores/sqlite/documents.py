"""Documents of a collection. Everything here runs in a transaction of its caller."""

from collections.abc import Sequence

import apsw
import numpy as np
import orjson

from pipelines.rag.stores.sqlite import chunk_ids, collections, conditions, segments, words
from pipelines.rag.stores.sqlite.rows import Row, one_row, rows
from pipelines.rag.types import DocumentChunk, DocumentFormat, DocumentInfo, Metadata, StoredDocument, Vectors
from sluice.errors import ErrorCode, SluiceError, invalid

_COLUMNS = "name, title, format, content_hash, num_chars, num_chunks, metadata, updated_s"


def info_of(connection: apsw.Connection, collection: str, name: str) -> DocumentInfo | None:
    row = _row(connection, collection, name, _COLUMNS)
    return None if row is None else _info(row)


def stored(connection: apsw.Connection, collection: str, name: str) -> StoredDocument | None:
    row = _row(connection, collection, name, f"text, {_COLUMNS}")
    return None if row is None else StoredDocument(_info(row[1:]), row[0])


def listed(connection: apsw.Connection, collection: str, after: str, limit: int) -> list[DocumentInfo]:
    number, _ = collections.id_and_dim(connection, collection)
    query = f"SELECT {_COLUMNS} FROM documents WHERE collection = ? AND name > ? ORDER BY name LIMIT ?"
    return [_info(row) for row in rows(connection, query, (number, after, limit))]


def put(
    connection: apsw.Connection,
    collection: str,
    document: StoredDocument,
    chunks: Sequence[DocumentChunk],
    vectors: Vectors,
) -> None:
    number, dim = collections.id_and_dim(connection, collection)
    if vectors.shape != (len(chunks), dim):
        expected = f"[{len(chunks)}, {dim}]: a vector of collection '{collection}' for each chunk"
        raise invalid("vectors", f"vectors must be {expected}, got {list(vectors.shape)}")
    if len(chunks) > chunk_ids.MAX_CHUNKS:
        message = f"a document may have {chunk_ids.MAX_CHUNKS} chunks, got {len(chunks)}"
        raise SluiceError(ErrorCode.TOO_LARGE, message, param="content")
    delete(connection, collection, document.info.id)
    row_id = _insert_document(connection, number, document)
    _insert_attributes(connection, number, row_id, document.info.metadata)
    _insert_chunks(connection, number, row_id, document.info.title, chunks, vectors)
    collections.count(connection, number, 1, len(chunks))


def delete(connection: apsw.Connection, collection: str, name: str) -> bool:
    """Whether there was one."""
    number, _ = collections.id_and_dim(connection, collection)
    query = "SELECT id, num_chunks FROM documents WHERE collection = ? AND name = ?"
    row = one_row(connection, query, (number, name))
    if row is None:
        return False
    row_id, num_chunks = row
    words.remove(connection, number, row_id)
    segments.remove(connection, row_id)
    connection.execute("DELETE FROM chunks WHERE id BETWEEN ? AND ?", chunk_ids.bounds(row_id))
    connection.execute("DELETE FROM attributes WHERE document = ?", (row_id,))
    connection.execute("DELETE FROM documents WHERE id = ?", (row_id,))
    collections.count(connection, number, -1, -num_chunks)
    return True


def metadata_of(text: str) -> Metadata:
    """As it is kept in the column of that name."""
    metadata: Metadata = orjson.loads(text)
    return metadata


def _insert_document(connection: apsw.Connection, collection: int, document: StoredDocument) -> int:
    info = document.info
    connection.execute(
        f"INSERT INTO documents (collection, text, {_COLUMNS}) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
        (
            collection,
            document.text,
            info.id,
            info.title,
            info.format.value,
            info.content_hash,
            info.num_chars,
            info.num_chunks,
            orjson.dumps(dict(info.metadata)).decode(),
            info.updated_s,
        ),
    )
    return int(connection.last_insert_rowid())


def _insert_attributes(connection: apsw.Connection, collection: int, document: int, metadata: Metadata) -> None:
    rows = [(document, collection, key, *conditions.stored(value)) for key, value in metadata.items()]
    connection.executemany(
        "INSERT INTO attributes (document, collection, key, kind, value) VALUES (?, ?, ?, ?, ?)", rows
    )


def _insert_chunks(
    connection: apsw.Connection,
    collection: int,
    document: int,
    title: str,
    chunks: Sequence[DocumentChunk],
    vectors: Vectors,
) -> None:
    first = chunk_ids.first_of(document)
    ids = np.arange(first, first + len(chunks), dtype=np.int64)
    places = segments.add(connection, collection, ids, np.ascontiguousarray(vectors, np.float32))
    for chunk_id, place, chunk in zip(ids.tolist(), places, chunks, strict=True):
        connection.execute(
            "INSERT INTO chunks (id, segment, slot, heading, start_char, end_char, num_tokens, text) "
            "VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
            (
                chunk_id,
                place.segment,
                place.slot,
                chunk.heading,
                chunk.start,
                chunk.end,
                chunk.num_tokens,
                chunk.text,
            ),
        )
        words.add(connection, collection, chunk_id, chunk.text, chunk.heading, title)


def _row(connection: apsw.Connection, collection: str, name: str, columns: str) -> Row | None:
    number, _ = collections.id_and_dim(connection, collection)
    query = f"SELECT {columns} FROM documents WHERE collection = ? AND name = ?"
    return one_row(connection, query, (number, name))


def _info(row: Row) -> DocumentInfo:
    """Of the columns `_COLUMNS`."""
    name, title, format_name, content_hash, num_chars, num_chunks, metadata, updated_s = row
    return DocumentInfo(
        id=name,
        title=title,
        format=DocumentFormat(format_name),
        content_hash=content_hash,
        num_chars=num_chars,
        num_chunks=num_chunks,
        metadata=metadata_of(metadata),
        updated_s=updated_s,
    )
