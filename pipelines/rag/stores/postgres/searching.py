"""Both rankings of one snapshot.

**Vectors.** HNSW looks at the `hnsw.ef_search` chunks that it finds nearest, and knows no filter. So few chunks are
compared one by one, whether the collection is small or the filter leaves few; of many the index looks at as many more
as the filter takes away. Where that was too few after all (a filter that goes against the question, rows just deleted),
all are compared. An answer is never shorter than it could be. `trial.py` says when the index is believed at all.

**Words.** BM25 over the chunks that have any of the words, with the document frequencies of this snapshot. Postgres
does not tell how often a word is in a row; `ts_rank` of one word does nearly: it sums 1/i² over i occurrences, heavier
ones for title and heading. Repetitions therefore count somewhat less than in BM25 by the book.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from pipelines.rag.filters import Filter
from pipelines.rag.stores.postgres import rows
from pipelines.rag.stores.postgres.catalog import CollectionRow
from pipelines.rag.stores.postgres.conditions import Expression, where
from pipelines.rag.stores.postgres.connections import Session
from pipelines.rag.stores.postgres.schema import MAX_INDEXED_DIM
from pipelines.rag.stores.postgres.terms import query_terms
from pipelines.rag.stores.postgres.trial import MAX_EF_SEARCH, IndexTrial
from pipelines.rag.types import CandidateHits, CandidateQuery, Hit, Vector

ChunkKey = tuple[int, int]
"""A document's key, and the chunk's index in it."""

_OVERSAMPLING = 2
"""Chunks looked at for each that is wanted and fulfils the filter."""

_K1 = 1.2
_B = 0.75
_HEAVIEST = 2.0
_WEIGHTS = "ARRAY[0.5, 0.5, 1, 1]::real[]"
"""Text, nothing, heading, title: ts_rank takes at most 1, so 1, 2 and 2 are divided by the heaviest."""
_RANK_OF_ONE = 1.64493406685
"""ts_rank divides by the limit of its sum, pi²/6, so that one occurrence of weight 1 gives its reciprocal."""

_NUM_CHUNKS = "SELECT coalesce(sum(d.num_chunks), 0)::bigint FROM sluice_rag_documents_{id} d WHERE {filter}"
_COMPARE = """
SELECT v.document, v.index FROM sluice_rag_vectors_{id} v {join}
ORDER BY (v.embedding <#> %s) + 0, v.document, v.index LIMIT %s
"""
_LOOK_UP = """
SELECT v.document, v.index FROM (
    SELECT document, index, embedding <#> %s AS distance FROM sluice_rag_vectors_{id} ORDER BY embedding <#> %s LIMIT %s
) v {join} ORDER BY v.distance, v.document, v.index LIMIT %s
"""
_RANK = f"""
WITH term AS MATERIALIZED (
    SELECT query, row_number() OVER () AS number FROM (
        SELECT plainto_tsquery('english', word) AS query FROM unnest(%s::text[]) word
        UNION SELECT name::tsquery FROM unnest(%s::text[]) name
    ) AS asked WHERE numnode(query) > 0
), posting AS MATERIALIZED (
    SELECT number, c.document, c.index, {_HEAVIEST * _RANK_OF_ONE} * ts_rank({_WEIGHTS}, c.terms, query) AS frequency,
           {_K1} * ({1 - _B} + {_B} * c.num_terms / %s) AS half
    FROM term JOIN sluice_rag_chunks_{{id}} c ON c.terms @@ query {{join}}
), rarity AS (
    SELECT number, ln(1 + (%s::float8 - count(*) + 0.5) / (count(*) + 0.5)) AS idf FROM posting GROUP BY number
)
SELECT document, index, sum(idf * frequency * {_K1 + 1} / (frequency + half)) AS score
FROM posting JOIN rarity USING (number)
GROUP BY document, index ORDER BY score DESC, document, index LIMIT %s
"""
_HITS = """
SELECT wanted.document, wanted.index, d.id, c.index, d.title, c.heading, c.start_char, c.end_char, c.text, d.metadata,
       {similarity}, {sent}
FROM unnest(%s::bigint[], %s::int[]) AS wanted (document, index)
JOIN sluice_rag_chunks_{id} c USING (document, index) JOIN sluice_rag_documents_{id} d ON d.key = document
JOIN sluice_rag_vectors_{id} v USING (document, index)
"""


@dataclass(frozen=True, slots=True)
class SearchTuning:
    """Up to `max_compared` chunks are compared one by one: exact, and as fast as the index where they are few.

    More `min_ef_search` find more of the nearest, and take in proportion longer; at most 1000.
    """

    max_compared: int = 10_000
    min_ef_search: int = 200


@dataclass(frozen=True, slots=True)
class Scope:
    """What of a collection is searched: the `num_chunks` of its documents that fulfil `filter`."""

    collection: CollectionRow
    num_chunks: int
    filter: Expression | None

    @property
    def id(self) -> int:
        return self.collection.id

    @property
    def join(self) -> Expression:
        """To those documents."""
        if self.filter is None:
            return "", []
        text, parameters = self.filter
        return f"JOIN sluice_rag_documents_{self.id} d ON d.key = document AND {text}", parameters


def num_to_look_at(scope: Scope, limit: int, max_compared: int) -> int | None:
    """How many chunks the index has to look at; None where comparing those in scope one by one is better."""
    info = scope.collection.info
    if scope.num_chunks <= max_compared or info.spec.dim > MAX_INDEXED_DIM:
        return None
    wanted = limit if scope.filter is None else limit * _OVERSAMPLING * info.num_chunks // scope.num_chunks
    return wanted if wanted <= MAX_EF_SEARCH else None


async def candidates(
    session: Session, collection: CollectionRow, query: CandidateQuery, trial: IndexTrial, max_compared: int
) -> CandidateHits:
    """Within the snapshot that the collection's row is of."""
    scope = await _scope(session, collection, query.filter)
    if scope.num_chunks == 0:
        return CandidateHits()
    num = num_to_look_at(scope, query.limit, max_compared)
    nearest = [] if query.vector is None else await _nearest(session, scope, query.vector, query.limit, num, trial)
    scores = {} if query.text is None else await _ranked(session, scope, query.text, query.limit)
    hits = await _hits(session, scope, query, {*nearest, *scores})
    by_text = [replace(hits[key], score=score) for key, score in scores.items()]
    return CandidateHits([hits[key] for key in nearest], by_text)


async def _scope(session: Session, collection: CollectionRow, filter: Filter | None) -> Scope:
    if filter is None:
        return Scope(collection, collection.info.num_chunks, None)
    text, parameters = where(filter)
    cursor = await session.execute(_NUM_CHUNKS.format(id=collection.id, filter=text), parameters)
    row = await cursor.fetchone()
    return Scope(collection, row[0] if row else 0, (text, parameters))


async def _nearest(
    session: Session, scope: Scope, vector: Vector, limit: int, num_to_look_at: int | None, trial: IndexTrial
) -> list[ChunkKey]:
    ef_search = trial.ef_search
    if num_to_look_at is None or ef_search is None:
        return await _compared(session, scope, vector, limit)
    width = max(num_to_look_at, ef_search)
    if trial.is_decided:
        found = await _looked_up(session, scope, vector, limit, width)
        is_full = len(found) == min(limit, scope.num_chunks)
        return found if is_full else await _compared(session, scope, vector, limit)
    right = await _compared(session, scope, vector, limit)
    if scope.filter is None and width == ef_search == trial.ef_search:
        trial.record(await _looked_up(session, scope, vector, limit, width), right)
    return right


async def _compared(session: Session, scope: Scope, vector: Vector, limit: int) -> list[ChunkKey]:
    join, parameters = scope.join
    return await _keys(session, _COMPARE.format(id=scope.id, join=join), [*parameters, vector, limit])


async def _looked_up(session: Session, scope: Scope, vector: Vector, limit: int, width: int) -> list[ChunkKey]:
    join, parameters = scope.join
    await session.execute(f"SET LOCAL hnsw.ef_search = {width}; SET LOCAL enable_seqscan = off")
    keys = await _keys(session, _LOOK_UP.format(id=scope.id, join=join), [vector, vector, width, *parameters, limit])
    await session.execute("SET LOCAL enable_seqscan = on")
    return keys


async def _ranked(session: Session, scope: Scope, text: str, limit: int) -> dict[ChunkKey, float]:
    """Best first."""
    terms = query_terms(text)
    if not terms.words:
        return {}
    join, parameters = scope.join
    statement = _RANK.format(id=scope.id, join=join)
    mean_terms = max(1.0, scope.collection.num_terms / scope.collection.info.num_chunks)
    given = [terms.words, terms.names, mean_terms, *parameters, scope.num_chunks, limit]
    # Each word is looked up in the index, however many rows the planner believes it to be in.
    await session.execute("SET LOCAL enable_seqscan = off")
    found = await (await session.execute(statement, given)).fetchall()
    await session.execute("SET LOCAL enable_seqscan = on")
    return {(document, index): float(score) for document, index, score in found}


async def _hits(session: Session, scope: Scope, query: CandidateQuery, keys: set[ChunkKey]) -> dict[ChunkKey, Hit]:
    similarity = "NULL" if query.vector is None else "-(v.embedding <#> %s)"
    sent = "vector_send(v.embedding)" if query.with_vectors else "NULL"
    statement = _HITS.format(id=scope.id, similarity=similarity, sent=sent)
    given: list[Any] = [] if query.vector is None else [query.vector]
    documents, indexes = [document for document, _ in keys], [index for _, index in keys]
    found = await (await session.execute(statement, [*given, documents, indexes])).fetchall()
    return {(row[0], row[1]): rows.hit(row[2:]) for row in found}


async def _keys(session: Session, statement: str, parameters: Sequence[Any]) -> list[ChunkKey]:
    return [(row[0], row[1]) for row in await (await session.execute(statement, parameters)).fetchall()]
