"""Searches by vector and by words in one snapshot.

**Vectors.** HNSW examines the `hnsw.ef_search` chunks that it finds nearest, and knows no filter. If few chunks are in
scope, because the collection is small or the filter leaves few, they are compared one by one. Else the index examines
as many more as the filter drops. If that was still too few (a filter at odds with the question, rows just deleted), all
are compared, so that an answer is never shorter than it could be. `IndexTrial` decides whether the index is trusted
at all.

**Words.** BM25 over the chunks that contain any of the words, with the document frequencies of this snapshot. Postgres
does not tell how often a row contains a word; `ts_rank` of one word nearly does: it sums 1/i² over i occurrences, with
higher weights for title and heading. Repetitions therefore count somewhat less than in textbook BM25.
"""

import json
from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from sluice.pipelines.encoding import Vector
from sluice.pipelines.rag.filters import Condition, Filter, Operator, Scalar
from sluice.pipelines.rag.stores.postgres import rows
from sluice.pipelines.rag.stores.postgres.rows import CollectionRow, extract_query_terms, make_storable
from sluice.pipelines.rag.stores.postgres.schema import MAX_INDEXED_DIM
from sluice.pipelines.rag.types import CandidateHits, CandidateQuery, CollectionInfo, Hit
from sluice.state.postgres import PostgresSession

MAX_EF_SEARCH = 1000
"""pgvector's limit."""
MIN_RECALL = 0.97
"""Required recall of the index. It is above the promised 0.95, since few questions measure it only roughly."""
_NUM_QUESTIONS = 16
_STEP = 2.5
_GROWTH = 2
"""A collection that has grown by this factor is tried again."""
_MAX_TRIED = 1_000_000
"""Chunks beyond which comparing all takes too long for a trial: such an index is trusted."""
Expression: TypeAlias = tuple[str, list[Any]]
"""SQL, and the parameters of its placeholders in order."""
ChunkKey = tuple[int, int]
"""A document's key, and the chunk's index in it."""
_COMPARISONS = {Operator.GT: ">", Operator.GTE: ">=", Operator.LT: "<", Operator.LTE: "<="}
_OVERSAMPLING = 2
"""Chunks examined for each one that is needed and fulfils the filter."""

_K1 = 1.2
_B = 0.75
_HEAVIEST = 2.0
_WEIGHTS = "ARRAY[0.5, 0.5, 1, 1]::real[]"
"""Weights of text, nothing, heading and title. ts_rank takes at most 1, so 1, 2 and 2 are divided by the heaviest."""
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
    ) AS queries WHERE numnode(query) > 0
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
SELECT found.document, found.index, d.id, c.index, d.title, c.heading, c.start_char, c.end_char, c.text, d.metadata,
       {similarity}, {sent}
FROM unnest(%s::bigint[], %s::int[]) AS found (document, index)
JOIN sluice_rag_chunks_{id} c USING (document, index) JOIN sluice_rag_documents_{id} d ON d.key = document
JOIN sluice_rag_vectors_{id} v USING (document, index)
"""


class IndexTrial:
    """Measures on a collection's first questions whether its vector index finds what comparing all chunks finds.

    HNSW finds nearly all neighbours if vectors lie in clusters, as those of texts do, and a fraction of them if they do
    not. So the first questions are answered by comparing all chunks, and searched in the index as well, with a greater
    `ef_search` each time that it found too few. If even the greatest finds too few, `ef_search` is None, and all chunks
    are compared from then on.
    """

    def __init__(self, num_chunks: int, ef_search: int) -> None:
        self.ef_search: int | None = ef_search
        self.is_decided = num_chunks > _MAX_TRIED
        self.num_chunks = num_chunks
        self._recalls: list[float] = []

    def record(self, found: Collection[Hashable], expected: Collection[Hashable]) -> None:
        """Record what the index found with `ef_search`, and what it should have found. Ignored once decided."""
        if self.is_decided or not expected or self.ef_search is None:
            return
        self._recalls.append(len(set(found) & set(expected)) / len(expected))
        if len(self._recalls) < _NUM_QUESTIONS:
            return
        is_enough = sum(self._recalls) / len(self._recalls) >= MIN_RECALL
        self._recalls.clear()
        if is_enough or self.ef_search == MAX_EF_SEARCH:
            self.is_decided = True
            self.ef_search = self.ef_search if is_enough else None
        else:
            self.ef_search = min(round(self.ef_search * _STEP), MAX_EF_SEARCH)


class IndexTrials:
    """The trials of one store's collections. Each starts with `min_ef_search`."""

    def __init__(self, min_ef_search: int) -> None:
        self._min_ef_search = min_ef_search
        self._trials: dict[int, IndexTrial] = {}

    def find(self, id: int, info: CollectionInfo) -> IndexTrial:
        """Return the current trial of the collection with this id."""
        trial = self._trials.get(id)
        if trial is None or info.num_chunks > trial.num_chunks * _GROWTH:
            trial = self._trials[id] = IndexTrial(info.num_chunks, self._min_ef_search)
        return trial


@dataclass(frozen=True, slots=True)
class SearchTuning:
    """Tuning of vector search.

    Up to `max_compared` chunks are compared one by one, which is exact, and as fast as the index for few chunks.
    A higher `min_ef_search` finds more of the nearest chunks and takes proportionally longer; at most 1000.
    """

    max_compared: int = 10_000
    min_ef_search: int = 200


@dataclass(frozen=True, slots=True)
class SearchScope:
    """The part of a collection that is searched: the `num_chunks` chunks of the documents that fulfil `filter`."""

    collection: CollectionRow
    num_chunks: int
    filter: Expression | None

    @property
    def id(self) -> int:
        return self.collection.id

    @property
    def join(self) -> Expression:
        """The SQL join of chunks with those documents."""
        if self.filter is None:
            return "", []
        text, parameters = self.filter
        return f"JOIN sluice_rag_documents_{self.id} d ON d.key = document AND {text}", parameters


def index_search_width(scope: SearchScope, limit: int, max_compared: int) -> int | None:
    """Return how many chunks the index has to examine, None if comparing those in scope one by one is better."""
    info = scope.collection.info
    if scope.num_chunks <= max_compared or info.spec.dim > MAX_INDEXED_DIM:
        return None
    width = limit if scope.filter is None else limit * _OVERSAMPLING * info.num_chunks // scope.num_chunks
    return width if width <= MAX_EF_SEARCH else None


async def find_candidates(
    session: PostgresSession, collection: CollectionRow, query: CandidateQuery, trial: IndexTrial, max_compared: int
) -> CandidateHits:
    """Search in the snapshot from which the collection's row was read."""
    scope = await _find_scope(session, collection, query.filter)
    if scope.num_chunks == 0:
        return CandidateHits()
    width = index_search_width(scope, query.limit, max_compared)
    nearest = (
        [] if query.vector is None else await _find_nearest(session, scope, query.vector, query.limit, width, trial)
    )
    scores = {} if query.text is None else await _rank_words(session, scope, query.text, query.limit)
    hits = await _read_hits(session, scope, query, {*nearest, *scores})
    by_text = [replace(hits[key], score=score) for key, score in scores.items()]
    return CandidateHits([hits[key] for key in nearest], by_text)


async def _find_scope(session: PostgresSession, collection: CollectionRow, filter: Filter | None) -> SearchScope:
    if filter is None:
        return SearchScope(collection, collection.info.num_chunks, None)
    text, parameters = filter_condition(filter)
    cursor = await session.execute(_NUM_CHUNKS.format(id=collection.id, filter=text), parameters)
    row = await cursor.fetchone()
    return SearchScope(collection, row[0] if row else 0, (text, parameters))


async def _find_nearest(
    session: PostgresSession,
    scope: SearchScope,
    vector: Vector,
    limit: int,
    min_width: int | None,
    trial: IndexTrial,
) -> list[ChunkKey]:
    ef_search = trial.ef_search
    if min_width is None or ef_search is None:
        return await _compare_all(session, scope, vector, limit)
    width = max(min_width, ef_search)
    if trial.is_decided:
        found = await _search_index(session, scope, vector, limit, width)
        is_full = len(found) == min(limit, scope.num_chunks)
        return found if is_full else await _compare_all(session, scope, vector, limit)
    nearest = await _compare_all(session, scope, vector, limit)
    if scope.filter is None and width == ef_search == trial.ef_search:
        trial.record(await _search_index(session, scope, vector, limit, width), nearest)
    return nearest


async def _compare_all(session: PostgresSession, scope: SearchScope, vector: Vector, limit: int) -> list[ChunkKey]:
    join, parameters = scope.join
    return await _select_keys(session, _COMPARE.format(id=scope.id, join=join), [*parameters, vector, limit])


async def _search_index(
    session: PostgresSession, scope: SearchScope, vector: Vector, limit: int, width: int
) -> list[ChunkKey]:
    join, parameters = scope.join
    await session.execute(f"SET LOCAL hnsw.ef_search = {width}; SET LOCAL enable_seqscan = off")
    keys = await _select_keys(
        session, _LOOK_UP.format(id=scope.id, join=join), [vector, vector, width, *parameters, limit]
    )
    await session.execute("SET LOCAL enable_seqscan = on")
    return keys


async def _rank_words(session: PostgresSession, scope: SearchScope, text: str, limit: int) -> dict[ChunkKey, float]:
    """Return the BM25 scores of the best chunks, best first."""
    terms = extract_query_terms(text)
    if not terms.words:
        return {}
    join, parameters = scope.join
    statement = _RANK.format(id=scope.id, join=join)
    mean_terms = max(1.0, scope.collection.num_terms / scope.collection.info.num_chunks)
    given = [terms.words, terms.names, mean_terms, *parameters, scope.num_chunks, limit]
    # Looks each word up in the index, however many rows the planner expects to contain it.
    await session.execute("SET LOCAL enable_seqscan = off")
    found = await (await session.execute(statement, given)).fetchall()
    await session.execute("SET LOCAL enable_seqscan = on")
    return {(document, index): float(score) for document, index, score in found}


async def _read_hits(
    session: PostgresSession, scope: SearchScope, query: CandidateQuery, keys: set[ChunkKey]
) -> dict[ChunkKey, Hit]:
    similarity = "NULL" if query.vector is None else "-(v.embedding <#> %s)"
    sent = "vector_send(v.embedding)" if query.with_vectors else "NULL"
    statement = _HITS.format(id=scope.id, similarity=similarity, sent=sent)
    given: list[Any] = [] if query.vector is None else [query.vector]
    documents, indexes = [document for document, _ in keys], [index for _, index in keys]
    found = await (await session.execute(statement, [*given, documents, indexes])).fetchall()
    return {(row[0], row[1]): rows.parse_hit(row[2:]) for row in found}


async def _select_keys(session: PostgresSession, statement: str, parameters: Sequence[Any]) -> list[ChunkKey]:
    return [(row[0], row[1]) for row in await (await session.execute(statement, parameters)).fetchall()]


def filter_condition(filter: Filter | None) -> Expression:
    """Build the SQL condition that the document `d` fulfils the filter. Keys and values are parameters only."""
    conditions = [_condition(condition) for condition in filter.conditions] if filter is not None else []
    text = " AND ".join(text for text, _ in conditions) or "true"
    return text, [parameter for _, parameters in conditions for parameter in parameters]


def _condition(condition: Condition) -> Expression:
    predicate, parameters = _predicate(condition.operator, condition.value)
    if condition.key in ("id", "title"):
        return f"(SELECT {predicate} FROM (VALUES (to_jsonb(d.{condition.key}))) AS given (v))", parameters
    given = "(VALUES (d.metadata -> %s::text)) AS given (v)"
    return f"(SELECT {predicate} FROM {given})", [*parameters, make_storable(condition.key)]


def _predicate(operator: Operator, value: Scalar | tuple[Scalar, ...]) -> Expression:
    """Build the predicate over `v`, the document's value as jsonb. Without a value, `v` is SQL's NULL, not JSON's."""
    if isinstance(value, tuple):
        is_in = "v = ANY (%s::text[]::jsonb[])"
        return is_in if operator is Operator.IN else f"({is_in}) IS NOT TRUE", [[_json(each) for each in value]]
    match operator:
        case Operator.EXISTS:
            return "(v IS NOT NULL) = %s::boolean", [value]
        case Operator.EQ:
            return "v = %s::jsonb", [_json(value)]
        case Operator.NE:
            return "v IS DISTINCT FROM %s::jsonb", [_json(value)]
        case _:
            return _comparison(operator, value)


def _comparison(operator: Operator, value: Scalar) -> Expression:
    if isinstance(value, str):
        text = """(v #>> '{}') COLLATE "C" """  # by code point, whatever the database's language
        holds = f"starts_with({text}, %s)" if operator is Operator.PREFIX else f"{text} {_COMPARISONS[operator]} %s"
        return f"jsonb_typeof(v) = 'string' AND {holds}", [make_storable(value)]
    if value is None or isinstance(value, bool) or operator is Operator.PREFIX:
        return "false", []
    return f"jsonb_typeof(v) = 'number' AND v {_COMPARISONS[operator]} %s::jsonb", [_json(value)]


def _json(value: Scalar) -> str:
    return json.dumps(make_storable(value) if isinstance(value, str) else value, ensure_ascii=False)
