"""Searches by vector and by words in one snapshot: all functions run in the caller's transaction."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import apsw
import numpy as np
import orjson

from sluice.errors import invalid
from sluice.pipelines.rag.stores.sqlite import documents, schema, segments, word_index
from sluice.pipelines.rag.stores.sqlite.filter_sql import SqlFragment, select_documents
from sluice.pipelines.rag.stores.sqlite.schema import Ids
from sluice.pipelines.rag.stores.sqlite.segments import Similarities, VectorSlot
from sluice.pipelines.rag.types import CandidateHits, CandidateQuery, Hit
from sluice.state.queries import query_rows

_Ranking = Sequence[tuple[int, float]]
"""Row ids of chunks with their scores, best first."""


def find_candidates(connection: apsw.Connection, collection: str, query: CandidateQuery) -> CandidateHits:
    collection_id, dim = documents.find_collection(connection, collection)
    if query.vector is not None and query.vector.shape != (dim,):
        expected = f"[{dim}], the length of the vectors of collection '{collection}'"
        raise invalid("vector", f"the query's vector must be {expected}, got {list(query.vector.shape)}")
    permitted = select_documents(collection_id, query.filter) if query.filter else None
    similarities = None
    if query.vector is not None:
        row_ids = _select_row_ids(connection, permitted) if permitted else None
        similarities = segments.compare_vectors(connection, collection_id, query.vector, row_ids)
    by_vector = similarities.best(query.limit) if similarities else []
    by_text = (
        word_index.rank_chunks(connection, collection_id, query.text, query.limit, permitted) if query.text else []
    )
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
        index, attributes = schema.chunk_index(chunk), documents.decode_metadata(metadata)
        vector = None if dim is None else segments.read_vector(connection, VectorSlot(segment, slot), dim)
        similarity = cosines.get(chunk)
        yield chunk, Hit(name, index, title, heading, start, end, text, 0.0, attributes, similarity, vector)
