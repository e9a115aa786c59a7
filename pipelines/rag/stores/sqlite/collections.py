"""Collections of a file. Everything here runs in a transaction of its caller."""

import time

import apsw
import msgspec

from pipelines.rag.stores.sqlite import chunk_ids, segments, words
from pipelines.rag.stores.sqlite.rows import Row, one_row, rows
from pipelines.rag.types import CollectionInfo, CollectionSpec
from sluice.errors import ErrorCode, SluiceError

_COLUMNS = "name, encoder, dim, key_hashes, num_documents, num_chunks, created_s"


def listed(connection: apsw.Connection) -> list[CollectionInfo]:
    return [_info(row) for row in rows(connection, f"SELECT {_COLUMNS} FROM collections ORDER BY name")]


def info_of(connection: apsw.Connection, name: str) -> CollectionInfo:
    row = one_row(connection, f"SELECT {_COLUMNS} FROM collections WHERE name = ?", (name,))
    if row is None:
        raise _missing(name)
    return _info(row)


def create(connection: apsw.Connection, spec: CollectionSpec) -> CollectionInfo:
    if one_row(connection, "SELECT 1 FROM collections WHERE name = ?", (spec.name,)):
        message = f"there is a collection '{spec.name}' already"
        raise SluiceError(ErrorCode.ALREADY_EXISTS, message, param="collection")
    connection.execute(
        "INSERT INTO collections (name, encoder, dim, key_hashes, created_s) VALUES (?, ?, ?, ?, ?)",
        (spec.name, spec.encoder, spec.dim, msgspec.json.encode(spec.key_hashes).decode(), time.time()),
    )
    words.create(connection, connection.last_insert_rowid())
    return info_of(connection, spec.name)


def delete(connection: apsw.Connection, name: str) -> None:
    collection, _ = id_and_dim(connection, name)
    words.drop(connection, collection)
    segments.remove_all(connection, collection)
    is_of_it = f"{chunk_ids.DOCUMENT_SQL.format('id')} IN (SELECT id FROM documents WHERE collection = ?)"
    connection.execute(f"DELETE FROM chunks WHERE {is_of_it}", (collection,))
    connection.execute("DELETE FROM attributes WHERE collection = ?", (collection,))
    connection.execute("DELETE FROM documents WHERE collection = ?", (collection,))
    connection.execute("DELETE FROM collections WHERE id = ?", (collection,))


def id_and_dim(connection: apsw.Connection, name: str) -> tuple[int, int]:
    """Its row id and the length of its vectors. Raises NOT_FOUND."""
    row = one_row(connection, "SELECT id, dim FROM collections WHERE name = ?", (name,))
    if row is None:
        raise _missing(name)
    return row[0], row[1]


def count(connection: apsw.Connection, collection: int, num_documents: int, num_chunks: int) -> None:
    """Add to its counts: every search looks at them, and counting takes as long as there are documents."""
    connection.execute(
        "UPDATE collections SET num_documents = num_documents + ?, num_chunks = num_chunks + ? WHERE id = ?",
        (num_documents, num_chunks, collection),
    )


def _info(row: Row) -> CollectionInfo:
    name, encoder, dim, key_hashes, num_documents, num_chunks, created_s = row
    spec = CollectionSpec(name, encoder, dim, msgspec.json.decode(key_hashes, type=tuple[str, ...]))
    return CollectionInfo(spec, num_documents, num_chunks, created_s)


def _missing(name: str) -> SluiceError:
    return SluiceError(ErrorCode.NOT_FOUND, f"there is no collection '{name}'", param="collection")
