"""Both rankings of one question. Runs in a transaction of its caller: what is found is of one moment."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import apsw
import numpy as np
import orjson

from pipelines.rag.stores.sqlite import chunk_ids, collections, documents, segments, words
from pipelines.rag.stores.sqlite.chunk_ids import Ids
from pipelines.rag.stores.sqlite.conditions import Sql, documents_where
from pipelines.rag.stores.sqlite.rows import rows
from pipelines.rag.stores.sqlite.segments import Place, Similarities
from pipelines.rag.types import CandidateHits, CandidateQuery, Hit, Vector
from sluice.errors import invalid

_Ranking = Sequence[tuple[int, float]]
"""Chunks and their scores, best first."""


def candidates(connection: apsw.Connection, collection: str, query: CandidateQuery) -> CandidateHits:
    number, dim = collections.id_and_dim(connection, collection)
    if query.vector is not None and query.vector.shape != (dim,):
        expected = f"[{dim}], the length of the vectors of collection '{collection}'"
        raise invalid("vector", f"the query's vector must be {expected}, got {list(query.vector.shape)}")
    permitted = documents_where(number, query.filter) if query.filter else None
    similarities = _similarities(connection, number, query.vector, permitted)
    by_vector = similarities.best(query.limit) if similarities else []
    by_text = words.ranked(connection, number, query.text, query.limit, permitted) if query.text else []
    return _with_hits(connection, by_vector, by_text, similarities, dim if query.with_vectors else None)


def _similarities(
    connection: apsw.Connection, collection: int, vector: Vector | None, permitted: Sql | None
) -> Similarities | None:
    if vector is None:
        return None
    return segments.compare(connection, collection, vector, _row_ids(connection, permitted))


def _row_ids(connection: apsw.Connection, permitted: Sql | None) -> Ids | None:
    if permitted is None:
        return None
    found = rows(connection, permitted.text, permitted.values)
    return np.fromiter((row_id for (row_id,) in found), np.int64)


def _with_hits(
    connection: apsw.Connection,
    by_vector: _Ranking,
    by_text: _Ranking,
    similarities: Similarities | None,
    dim: int | None,
) -> CandidateHits:
    """`dim`, where hits carry their vectors, is their length."""
    found = list({chunk for chunk, _ in (*by_vector, *by_text)})
    cosines = similarities.of(found) if similarities else {}
    hits = dict(_hits(connection, found, cosines, dim))
    return CandidateHits(_scored(by_vector, hits), _scored(by_text, hits))


def _scored(ranking: _Ranking, hits: Mapping[int, Hit]) -> list[Hit]:
    return [replace(hits[chunk], score=score) for chunk, score in ranking]


_ROWS = f"""
    SELECT chunks.id, segment, slot, name, title, heading, start_char, end_char, chunks.text, metadata
    FROM json_each(?) AS wanted
    JOIN chunks ON chunks.id = wanted.value
    JOIN documents ON documents.id = {chunk_ids.DOCUMENT_SQL.format("chunks.id")}
"""


def _hits(
    connection: apsw.Connection, chunks: Sequence[int], cosines: Mapping[int, float], dim: int | None
) -> Iterable[tuple[int, Hit]]:
    """Without their scores."""
    found = rows(connection, _ROWS, (orjson.dumps(chunks).decode(),))
    for chunk, segment, slot, name, title, heading, start, end, text, metadata in found:
        yield (
            chunk,
            Hit(
                document_id=name,
                chunk_index=chunk_ids.index_of(chunk),
                title=title,
                heading=heading,
                start=start,
                end=end,
                text=text,
                score=0.0,
                metadata=documents.metadata_of(metadata),
                similarity=cosines.get(chunk),
                vector=None if dim is None else segments.vector_at(connection, Place(segment, slot), dim),
            ),
        )
