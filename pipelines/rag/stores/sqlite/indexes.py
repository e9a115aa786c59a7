"""The two indexes of a collection: its vectors in segments, and the words of its chunks in an FTS5 table.

A segment holds up to SLOTS vectors of one collection: `slots` [SLOTS] int64 are the row ids of their chunks, 0 for a
free slot, and `vectors` [SLOTS, dim] float32 stand in a table of their own because SQLite rewrites whole rows. New
documents take the slots that deleted ones leave. Rows of one vector each would take several times as long to read;
sqlite-vec's blocks keep their holes until a whole block is empty.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import apsw
import numpy as np

from sluice.pipelines.encoding import Vector, Vectors
from sluice.pipelines.rag.stores.sqlite import schema
from sluice.pipelines.rag.stores.sqlite.filter_sql import SqlFragment
from sluice.pipelines.rag.stores.sqlite.schema import Ids
from sluice.state.queries import query_row, query_rows

SLOTS = 256
_FREE = 0
_FEW_DOCUMENTS = 256
"""Up to so many matching documents, a search reads only the segments that hold them."""
_SPLIT = ("unicode61", "remove_diacritics", "2")
"""Tokenizer that splits `max_num_seqs`, `str.partition` and `--http-port` into their words and removes accents."""
_STEM = ("porter", *_SPLIT)
"""Tokenizer that also stems English words: the same measure found less without it."""
_MAX_TERMS = 256
"""Most terms of one question: more of them only take more time."""
_MANY_CHUNKS = 4096
"""Chunks from which on words that nearly every chunk contains take more time than all other words of a question."""
_PIECE = re.compile(r"\S+")


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


def create_index(connection: apsw.Connection, collection: int) -> None:
    """Create the collection's index of words, for BM25. Other collections' words do not count in its ranking.

    It is contentless: the texts stand in `chunks`, in rows of the same ids. Text, heading and title weigh the same:
    giving headings more weight found less (benchmarks/rag/quality.py).
    """
    connection.execute(
        f"CREATE VIRTUAL TABLE words_{collection:d} USING fts5("
        f"text, heading, title, content='', contentless_delete=1, tokenize='{' '.join(_STEM)}')"
    )
    connection.execute(f"CREATE VIRTUAL TABLE terms_{collection:d} USING fts5vocab(words_{collection:d}, row)")


def drop_index(connection: apsw.Connection, collection: int) -> None:
    connection.execute(f"DROP TABLE terms_{collection:d}")
    connection.execute(f"DROP TABLE words_{collection:d}")


def add_chunk(connection: apsw.Connection, collection: int, chunk: int, text: str, heading: str, title: str) -> None:
    connection.execute(
        f"INSERT INTO words_{collection:d}(rowid, text, heading, title) VALUES (?, ?, ?, ?)",
        (chunk, text, heading, title),
    )


def remove_document(connection: apsw.Connection, collection: int, document: int) -> None:
    connection.execute(
        f"DELETE FROM words_{collection:d} WHERE rowid BETWEEN ? AND ?", schema.chunk_id_bounds(document)
    )


def rank_chunks(
    connection: apsw.Connection, collection: int, question: str, limit: int, documents: SqlFragment | None
) -> list[tuple[int, float]]:
    """Rank chunks that contain a word of the question by BM25, best first.

    Equal ones stay in the order in which they were added. `documents` selects the row ids of the documents to search.
    """
    match = _match_expression(connection, collection, question)
    if not match:
        return []
    table = f"words_{collection:d}"
    condition = f"AND {schema.DOCUMENT_SQL.format('rowid')} IN ({documents.text})" if documents else ""
    found = query_rows(
        connection,
        f"SELECT rowid, -bm25({table}) AS score FROM {table} "
        f"WHERE {table} MATCH ? {condition} ORDER BY score DESC, rowid LIMIT ?",
        (match, *(documents.values if documents else ()), limit),
    )
    return [(chunk, score) for chunk, score in found]


def _match_expression(connection: apsw.Connection, collection: int, question: str) -> str:
    """Match any of the question's words, and names among them, such as `max_num_seqs`, also as phrases."""
    terms = _first_distinct(_split_terms(connection, question), _MAX_TERMS)
    rare = _drop_frequent(connection, collection, terms)
    return " OR ".join(f'"{term}"' for term in rare or terms)


def _split_terms(connection: apsw.Connection, question: str) -> Iterator[str]:
    """Split the question by FTS5's own tokenizer, which leaves no character that has a meaning in FTS5's queries."""
    for piece in _PIECE.findall(question):
        words = _tokenize(connection, _SPLIT, piece)
        yield from words
        if len(words) > 1:
            yield " ".join(words)


def _first_distinct(terms: Iterable[str], limit: int) -> list[str]:
    """Return the first `limit` distinct terms. Reads no more terms than needed."""
    found: dict[str, None] = {}
    for term in terms:
        found[term] = None
        if len(found) == limit:
            break
    return list(found)


def _drop_frequent(connection: apsw.Connection, collection: int, terms: Sequence[str]) -> list[str]:
    """Drop words that more than half of all chunks contain, whose weight in FTS5's BM25 is a millionth."""
    row = query_row(connection, "SELECT num_chunks FROM collections WHERE id = ?", (collection,))
    num_chunks = row[0] if row else 0
    if num_chunks < _MANY_CHUNKS:
        return list(terms)
    return [term for term in terms if " " in term or _count_chunks(connection, collection, term) <= num_chunks / 2]


def _count_chunks(connection: apsw.Connection, collection: int, word: str) -> int:
    stem = "".join(_tokenize(connection, _STEM, word))
    row = query_row(connection, f"SELECT doc FROM terms_{collection:d} WHERE term = ?", (stem,))
    return row[0] if row else 0


def _tokenize(connection: apsw.Connection, tokenizer: tuple[str, ...], text: str) -> list[str]:
    tokenize = connection.fts5_tokenizer(tokenizer[0], list(tokenizer[1:]))
    utf8 = text.encode(errors="replace")
    tokens = tokenize(utf8, apsw.FTS5_TOKENIZE_QUERY, None, include_offsets=False, include_colocated=False)
    return [str(token) for token in tokens]
