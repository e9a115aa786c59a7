"""The tables of a store's file, their upgrade from older versions, and the row ids of chunks.

A chunk's row id has its document's row id in the upper bits and its index in the document in the lower ones. So a
ranking needs no join to know a chunk's document, and ids rise in the order in which chunks were added. Row ids of
documents are never reused (AUTOINCREMENT), hence neither are those of chunks.
"""

import numpy as np
import numpy.typing as npt

from sluice.state.connections import Schema

APPLICATION_ID = 0x536C7267
"""Identifies the file as a store in its header ("Slrg")."""
_INDEX_BITS = 20
MAX_CHUNKS = 1 << _INDEX_BITS
"""Most chunks of one document."""
DOCUMENT_SQL = f"({{0}} >> {_INDEX_BITS})"
"""SQL for the row id of the document of the chunk {0}."""
FIRST_CHUNK_SQL = f"({{0}} << {_INDEX_BITS})"
"""SQL for the least row id that a chunk of the document {0} can have."""
LAST_CHUNK_SQL = f"(({{0}} + 1 << {_INDEX_BITS}) - 1)"
"""SQL for the greatest row id that a chunk of the document {0} can have."""

Ids = npt.NDArray[np.int64]
"""[n] int64 row ids."""

_STEPS = (
    """
    CREATE TABLE collections (
        id INTEGER PRIMARY KEY AUTOINCREMENT,
        name TEXT NOT NULL UNIQUE,
        encoder TEXT NOT NULL,
        dim INTEGER NOT NULL,
        key_hashes TEXT NOT NULL,
        created_s REAL NOT NULL,
        num_documents INTEGER NOT NULL DEFAULT 0,
        num_chunks INTEGER NOT NULL DEFAULT 0
    ) STRICT;
    CREATE TABLE documents (
        id INTEGER PRIMARY KEY AUTOINCREMENT,
        collection INTEGER NOT NULL REFERENCES collections,
        name TEXT NOT NULL,
        title TEXT NOT NULL,
        format TEXT NOT NULL,
        content_hash TEXT NOT NULL,
        num_chars INTEGER NOT NULL,
        num_chunks INTEGER NOT NULL,
        metadata TEXT NOT NULL,
        updated_s REAL NOT NULL,
        text TEXT NOT NULL,
        UNIQUE (collection, name)
    ) STRICT;
    CREATE TABLE attributes (
        document INTEGER NOT NULL REFERENCES documents,
        collection INTEGER NOT NULL REFERENCES collections,
        key TEXT NOT NULL,
        kind TEXT NOT NULL,
        value ANY,
        PRIMARY KEY (document, key)
    ) STRICT, WITHOUT ROWID;
    CREATE INDEX attributes_by_value ON attributes (collection, key, kind, value, document);
    CREATE TABLE segments (
        id INTEGER PRIMARY KEY,
        collection INTEGER NOT NULL REFERENCES collections,
        num_free INTEGER NOT NULL,
        slots BLOB NOT NULL
    ) STRICT;
    CREATE INDEX segments_by_room ON segments (collection, num_free);
    CREATE TABLE segment_vectors (
        segment INTEGER PRIMARY KEY REFERENCES segments,
        vectors BLOB NOT NULL
    ) STRICT;
    CREATE TABLE chunks (
        id INTEGER PRIMARY KEY,
        segment INTEGER NOT NULL REFERENCES segments,
        slot INTEGER NOT NULL,
        heading TEXT NOT NULL,
        start_char INTEGER NOT NULL,
        end_char INTEGER NOT NULL,
        num_tokens INTEGER NOT NULL,
        text TEXT NOT NULL
    ) STRICT;
    """,
)
"""Statements by version: step n upgrades a file from version n to n + 1.

`document` and `collection` are row ids in every table; a document's own id is its `name`. `attributes` holds documents'
metadata for filters, one row for each key. `indexes.py` explains segments, and creates further tables for
each collection.
"""

SCHEMA = Schema(APPLICATION_ID, _STEPS)


def first_chunk_id(document: int) -> int:
    return document << _INDEX_BITS


def chunk_id_bounds(document: int) -> tuple[int, int]:
    """Return the least and the greatest row id that a chunk of the document can have."""
    return first_chunk_id(document), first_chunk_id(document + 1) - 1


def document_ids(chunks: Ids) -> Ids:
    return chunks >> _INDEX_BITS


def chunk_index(chunk: int) -> int:
    """Return the chunk's index in its document."""
    return chunk & (MAX_CHUNKS - 1)
