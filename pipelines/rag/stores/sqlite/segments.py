"""Vectors, kept in segments that a search reads one after the other.

A segment holds up to SLOTS vectors of one collection: `slots` [SLOTS] int64 are the row ids of their chunks, 0 for a
free slot, and `vectors` [SLOTS, dim] float32 stand in a table of their own because SQLite rewrites whole rows. New
documents take the slots that deleted ones leave. Rows of one vector each would take several times as long to read;
sqlite-vec's blocks keep their holes until a whole block is empty.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import apsw
import numpy as np

from sluice.pipelines.encoding import Vector, Vectors
from sluice.pipelines.rag.stores.sqlite import schema
from sluice.pipelines.rag.stores.sqlite.schema import Ids
from sluice.state.queries import query_row, query_rows

SLOTS = 256
_FREE = 0
_FEW_DOCUMENTS = 256
"""Up to so many matching documents, a search reads only the segments that hold them."""


@dataclass(frozen=True, slots=True)
class VectorSlot:
    """The place of a chunk's vector."""

    segment: int
    index: int


def add_vectors(connection: apsw.Connection, collection: int, chunks: Ids, vectors: Vectors) -> list[VectorSlot]:
    """Store the vectors of chunks, in free slots first. Returns the slot of each."""
    filled: list[VectorSlot] = []
    while len(filled) < len(chunks):
        segment, slots = _find_free(connection, collection) or _create(connection, collection, vectors.shape[1])
        start = len(filled)
        taken = np.flatnonzero(slots == _FREE)[: len(chunks) - start]
        slots[taken] = chunks[start : start + len(taken)]
        _write_vectors(connection, segment, taken, vectors[start : start + len(taken)])
        _write_slots(connection, segment, slots)
        filled += [VectorSlot(segment, int(index)) for index in taken]
    return filled


def remove_vectors(connection: apsw.Connection, document: int) -> None:
    """Free the slots of a document's chunks, which must still be in `chunks`."""
    query = "SELECT id, slots FROM segments WHERE id IN (SELECT segment FROM chunks WHERE id BETWEEN ? AND ?)"
    for segment, blob in list(query_rows(connection, query, schema.chunk_id_bounds(document))):
        slots = np.frombuffer(blob, np.int64).copy()
        slots[schema.document_ids(slots) == document] = _FREE
        if slots.any():
            _write_slots(connection, segment, slots)
        else:
            connection.execute("DELETE FROM segment_vectors WHERE segment = ?", (segment,))
            connection.execute("DELETE FROM segments WHERE id = ?", (segment,))


def remove_all_vectors(connection: apsw.Connection, collection: int) -> None:
    connection.execute(
        "DELETE FROM segment_vectors WHERE segment IN (SELECT id FROM segments WHERE collection = ?)", (collection,)
    )
    connection.execute("DELETE FROM segments WHERE collection = ?", (collection,))


def read_vector(connection: apsw.Connection, slot: VectorSlot, dim: int) -> Vector:
    row_bytes = dim * np.dtype(np.float32).itemsize
    with connection.blob_open("main", "segment_vectors", "vectors", slot.segment, False) as blob:
        blob.seek(slot.index * row_bytes)
        row = blob.read(row_bytes)
    return np.frombuffer(row, np.float32)


@dataclass(frozen=True, slots=True)
class Similarities:
    """The cosines to a query, [n] float32, of `chunks` [n] int64."""

    chunks: Ids
    cosines: Vector

    def best(self, limit: int) -> list[tuple[int, float]]:
        """Return the most similar chunks, best first. Equal ones stay in the order in which they were added."""
        near = np.arange(len(self.chunks))
        if limit < len(near):
            least = np.partition(self.cosines, -limit)[-limit]
            near = np.flatnonzero(self.cosines >= least)
        order = near[np.lexsort((self.chunks[near], -self.cosines[near]))][:limit]
        return [(int(self.chunks[index]), float(self.cosines[index])) for index in order]

    def select(self, chunks: Sequence[int]) -> dict[int, float]:
        """Return the cosines of `chunks` by row id."""
        found = np.flatnonzero(np.isin(self.chunks, np.array(chunks, np.int64)))
        return {int(self.chunks[index]): float(self.cosines[index]) for index in found}


def compare_vectors(
    connection: apsw.Connection, collection: int, vector: Vector, documents: Ids | None
) -> Similarities:
    """Compare the vector with every chunk of the collection, or of the documents with these row ids."""
    slots, cosines = [np.empty(0, np.int64)], [np.empty(0, np.float32)]
    for block_slots, block in _read_blocks(connection, collection, len(vector), documents):
        slots.append(block_slots)
        cosines.append(block @ vector)
    chunks = np.concatenate(slots)
    is_searched = chunks != _FREE
    if documents is not None:
        is_searched &= np.isin(schema.document_ids(chunks), documents)
    return Similarities(chunks[is_searched], np.concatenate(cosines)[is_searched])


def _read_blocks(
    connection: apsw.Connection, collection: int, dim: int, documents: Ids | None
) -> Iterator[tuple[Ids, Vectors]]:
    query = "SELECT slots, vectors FROM segments JOIN segment_vectors ON segment = id WHERE collection = ?"
    values: tuple[int | str, ...] = (collection,)
    if documents is not None and len(documents) <= _FEW_DOCUMENTS:
        query += f" AND id IN ({_SEGMENTS_OF_DOCUMENTS})"
        values = (collection, str(documents.tolist()))
    for slots, vectors in query_rows(connection, query, values):
        yield np.frombuffer(slots, np.int64), np.frombuffer(vectors, np.float32).reshape(-1, dim)


_SEGMENTS_OF_DOCUMENTS = (
    "SELECT chunks.segment FROM json_each(?) AS document "
    f"JOIN chunks ON chunks.id BETWEEN {schema.FIRST_CHUNK_SQL.format('document.value')} "
    f"AND {schema.LAST_CHUNK_SQL.format('document.value')}"
)
"""Selects the segments of the documents in a JSON array of row ids."""


def _find_free(connection: apsw.Connection, collection: int) -> tuple[int, Ids] | None:
    """Return a segment with a free slot, and its slots."""
    query = "SELECT id, slots FROM segments WHERE collection = ? AND num_free > 0 LIMIT 1"
    row = query_row(connection, query, (collection,))
    return (row[0], np.frombuffer(row[1], np.int64).copy()) if row else None


def _create(connection: apsw.Connection, collection: int, dim: int) -> tuple[int, Ids]:
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
    """Write into the blob in place, so that only the pages of these slots are written."""
    row_bytes = vectors.shape[1] * vectors.itemsize
    with connection.blob_open("main", "segment_vectors", "vectors", segment, True) as blob:
        for slot, vector in zip(taken.tolist(), vectors, strict=True):
            blob.seek(slot * row_bytes)
            blob.write(vector.tobytes())
