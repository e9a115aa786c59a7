"""Vectors, in blocks that a search reads one after the other.

A segment holds up to SLOTS vectors of one collection: `slots` [SLOTS] int64 are the ids of their chunks, 0 where a slot
is free, and `vectors` [SLOTS, dim] float32, in a table of its own because SQLite writes whole rows anew. Slots that
deleted documents leave are taken by the next ones. Rows of one vector each would take several times as long to read;
sqlite-vec's own blocks keep their holes until a whole block is empty.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import apsw
import numpy as np

from pipelines.rag.stores.sqlite import chunk_ids
from pipelines.rag.stores.sqlite.chunk_ids import Ids
from pipelines.rag.stores.sqlite.rows import one_row, rows
from pipelines.rag.types import Vector, Vectors

SLOTS = 256
_FREE = 0
_FEW_DOCUMENTS = 256
"""Up to so many, a search reads only the segments that hold them."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a chunk's vector is."""

    segment: int
    slot: int


def add(connection: apsw.Connection, collection: int, chunks: Ids, vectors: Vectors) -> list[Place]:
    """Keep the vectors of chunks, in free slots first; returns the place of each."""
    places: list[Place] = []
    while len(places) < len(chunks):
        segment, slots = _with_room(connection, collection) or _new(connection, collection, vectors.shape[1])
        start = len(places)
        taken = np.flatnonzero(slots == _FREE)[: len(chunks) - start]
        slots[taken] = chunks[start : start + len(taken)]
        _write_vectors(connection, segment, taken, vectors[start : start + len(taken)])
        _write_slots(connection, segment, slots)
        places += [Place(segment, int(slot)) for slot in taken]
    return places


def remove(connection: apsw.Connection, document: int) -> None:
    """Free the slots of a document's chunks, which must still be in `chunks`."""
    query = "SELECT id, slots FROM segments WHERE id IN (SELECT segment FROM chunks WHERE id BETWEEN ? AND ?)"
    for segment, blob in list(rows(connection, query, chunk_ids.bounds(document))):
        slots = np.frombuffer(blob, np.int64).copy()
        slots[chunk_ids.documents_of(slots) == document] = _FREE
        if slots.any():
            _write_slots(connection, segment, slots)
        else:
            connection.execute("DELETE FROM segment_vectors WHERE segment = ?", (segment,))
            connection.execute("DELETE FROM segments WHERE id = ?", (segment,))


def remove_all(connection: apsw.Connection, collection: int) -> None:
    connection.execute(
        "DELETE FROM segment_vectors WHERE segment IN (SELECT id FROM segments WHERE collection = ?)", (collection,)
    )
    connection.execute("DELETE FROM segments WHERE collection = ?", (collection,))


def vector_at(connection: apsw.Connection, place: Place, dim: int) -> Vector:
    row_bytes = dim * np.dtype(np.float32).itemsize
    with connection.blob_open("main", "segment_vectors", "vectors", place.segment, False) as blob:
        blob.seek(place.slot * row_bytes)
        row = blob.read(row_bytes)
    return np.frombuffer(row, np.float32)


@dataclass(frozen=True, slots=True)
class Similarities:
    """The cosine to a query, `cosines` [n] float32, of each of the chunks `chunks` [n]."""

    chunks: Ids
    cosines: Vector

    def best(self, limit: int) -> list[tuple[int, float]]:
        """Best first; equals in the order in which they came."""
        near = np.arange(len(self.chunks))
        if limit < len(near):
            least = np.partition(self.cosines, -limit)[-limit]
            near = np.flatnonzero(self.cosines >= least)
        order = near[np.lexsort((self.chunks[near], -self.cosines[near]))][:limit]
        return [(int(self.chunks[index]), float(self.cosines[index])) for index in order]

    def of(self, chunks: Sequence[int]) -> dict[int, float]:
        """The cosines of `chunks`."""
        found = np.flatnonzero(np.isin(self.chunks, np.array(chunks, np.int64)))
        return {int(self.chunks[index]): float(self.cosines[index]) for index in found}


def compare(connection: apsw.Connection, collection: int, vector: Vector, documents: Ids | None) -> Similarities:
    """With every chunk of the collection, or of the documents with the row ids `documents`."""
    slots, cosines = [np.empty(0, np.int64)], [np.empty(0, np.float32)]
    for block_slots, block in _blocks(connection, collection, len(vector), documents):
        slots.append(block_slots)
        cosines.append(block @ vector)
    chunks = np.concatenate(slots)
    is_wanted = chunks != _FREE
    if documents is not None:
        is_wanted &= np.isin(chunk_ids.documents_of(chunks), documents)
    return Similarities(chunks[is_wanted], np.concatenate(cosines)[is_wanted])


def _blocks(
    connection: apsw.Connection, collection: int, dim: int, documents: Ids | None
) -> Iterator[tuple[Ids, Vectors]]:
    query = "SELECT slots, vectors FROM segments JOIN segment_vectors ON segment = id WHERE collection = ?"
    values: tuple[int | str, ...] = (collection,)
    if documents is not None and len(documents) <= _FEW_DOCUMENTS:
        query += f" AND id IN ({_HOLDING})"
        values = (collection, str(documents.tolist()))
    for slots, vectors in rows(connection, query, values):
        yield np.frombuffer(slots, np.int64), np.frombuffer(vectors, np.float32).reshape(-1, dim)


_HOLDING = (
    "SELECT chunks.segment FROM json_each(?) AS document "
    f"JOIN chunks ON chunks.id BETWEEN {chunk_ids.FIRST_SQL.format('document.value')} "
    f"AND {chunk_ids.LAST_SQL.format('document.value')}"
)
"""The segments of the documents in a JSON array of row ids."""


def _with_room(connection: apsw.Connection, collection: int) -> tuple[int, Ids] | None:
    """A segment with a free slot, and its slots."""
    query = "SELECT id, slots FROM segments WHERE collection = ? AND num_free > 0 LIMIT 1"
    row = one_row(connection, query, (collection,))
    return (row[0], np.frombuffer(row[1], np.int64).copy()) if row else None


def _new(connection: apsw.Connection, collection: int, dim: int) -> tuple[int, Ids]:
    slots = np.full(SLOTS, _FREE, np.int64)
    insert = "INSERT INTO segments (collection, num_free, slots) VALUES (?, ?, ?)"
    connection.execute(insert, (collection, SLOTS, slots.tobytes()))
    segment = connection.last_insert_rowid()
    size = SLOTS * dim * np.dtype(np.float32).itemsize
    connection.execute("INSERT INTO segment_vectors (segment, vectors) VALUES (?, zeroblob(?))", (segment, size))
    return segment, slots


def _write_slots(connection: apsw.Connection, segment: int, slots: Ids) -> None:
    num_free = int(np.count_nonzero(slots == _FREE))
    connection.execute("UPDATE segments SET num_free = ?, slots = ? WHERE id = ?", (num_free, slots.tobytes(), segment))


def _write_vectors(connection: apsw.Connection, segment: int, taken: Ids, vectors: Vectors) -> None:
    """Into the blob where it is: only the pages of these slots are written."""
    row_bytes = vectors.shape[1] * vectors.itemsize
    with connection.blob_open("main", "segment_vectors", "vectors", segment, True) as blob:
        for slot, vector in zip(taken.tolist(), vectors, strict=True):
            blob.seek(slot * row_bytes)
            blob.write(vector.tobytes())
