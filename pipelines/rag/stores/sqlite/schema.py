"""The tables of a store's file, and how an older file becomes one of today."""

import apsw

from pipelines.rag.stores.sqlite.transactions import writing

APPLICATION_ID = 0x536C7267
"""Marks a file as ours, in its header ("Slrg")."""

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
"""Step n takes a file of version n to n + 1.

`document` and `collection` are row ids in every table; a document's own id is its `name`. `attributes` is documents'
metadata as filters look at it, a row a key. chunk_ids.py says what a chunk's id is, segments.py what segments are;
each collection has tables of words besides (words.py).
"""

VERSION = len(_STEPS)


class ForeignFileError(Exception):
    """The file is no store, or one of a later Sluice. The message goes on after "cannot be used: "."""


def upgrade(connection: apsw.Connection) -> None:
    """Make or upgrade the tables; several processes may do so at once. Raises ForeignFileError."""
    if _version(connection) == VERSION:
        return
    with writing(connection):
        for step in _STEPS[_version(connection) :]:  # read again: another process may have been faster
            connection.execute(step)
        connection.pragma("application_id", APPLICATION_ID)
        connection.pragma("user_version", VERSION)


def _version(connection: apsw.Connection) -> int:
    version = int(connection.pragma("user_version"))
    is_empty = connection.execute("SELECT count(*) FROM sqlite_schema").get == 0
    if not is_empty and connection.pragma("application_id") != APPLICATION_ID:
        raise ForeignFileError("it is another program's database; name a file of its own for the store")
    if version > VERSION:
        raise ForeignFileError(f"its version is {version} and this Sluice knows up to {VERSION}: it needs a newer one")
    return version
