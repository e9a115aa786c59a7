"""The choice between the index and comparing all chunks, and the recall of both."""

import asyncio
from collections.abc import AsyncIterator

import numpy as np
import psycopg
import pytest

from sluice.pipelines.encoding import Vector, Vectors
from sluice.pipelines.rag.filters import Operator
from sluice.pipelines.rag.stores.postgres.rows import CollectionRow
from sluice.pipelines.rag.stores.postgres.search import SearchScope, SearchTuning, index_search_width
from sluice.pipelines.rag.stores.postgres.store import PostgresStore
from sluice.pipelines.rag.types import CollectionInfo, CollectionSpec
from tests.pipelines.rag.stores.corpus import SPEC, ids, matching, nearest, put, unit_vectors, where
from tests.pipelines.rag.stores.postgres_fixture import shared_server

pytestmark = pytest.mark.slow

NUM_DOCUMENTS = 12
NUM_CHUNKS = 100
"""Chunks of each document."""
TUNING = SearchTuning(max_compared=300, min_ef_search=100)


class Indexed:
    """Fill a collection that is large enough for its index; half of its documents are even."""

    def __init__(self, store: PostgresStore, url: str) -> None:
        self.store = store
        self.vectors: Vectors = unit_vectors(NUM_DOCUMENTS * NUM_CHUNKS, 1)
        self._url = url

    async def fill(self) -> None:
        await self.store.create_collection(SPEC)
        for number in range(NUM_DOCUMENTS):
            rows = self.vectors[number * NUM_CHUNKS : (number + 1) * NUM_CHUNKS]
            metadata = {"number": number, "is_even": number % 2 == 0}
            await put(self.store, f"d{number:02}", ["text"] * NUM_CHUNKS, vectors=rows, metadata=metadata)

    def num_index_scans(self) -> int:
        with psycopg.connect(self._url) as connection:
            connection.execute("SELECT pg_stat_force_next_flush()")
            query = "SELECT sum(idx_scan) FROM pg_stat_user_indexes WHERE indexrelname LIKE '%embedding_idx'"
            row = connection.execute(query).fetchone()
        return int(row[0]) if row else 0

    def nearest(self, query: Vector, num: int, documents: range = range(NUM_DOCUMENTS)) -> list[tuple[str, int]]:
        """Return the nearest chunks by comparing all."""
        rows = [number * NUM_CHUNKS + index for number in documents for index in range(NUM_CHUNKS)]
        order = np.argsort(-(self.vectors[rows] @ query))[:num]
        return [(f"d{rows[at] // NUM_CHUNKS:02}", rows[at] % NUM_CHUNKS) for at in order]


async def _fill(url: str) -> None:
    store = PostgresStore(url)
    await store.open()
    await Indexed(store, url).fill()
    await store.close()


@pytest.fixture(scope="module")
def filled() -> str:
    """A filled database to be copied: filling one takes seconds."""
    database = shared_server().create_database()
    asyncio.run(_fill(shared_server().url(database)))
    return database


@pytest.fixture
async def indexed(filled: str) -> AsyncIterator[Indexed]:
    """A store whose index is already trusted."""
    url = shared_server().url(shared_server().create_database(filled))
    store = PostgresStore(url, tuning=TUNING)
    await store.open()
    indexed = Indexed(store, url)
    for query in unit_vectors(16, 7):
        await nearest(store, query)
    yield indexed
    await store.close()


def recall(found: list[tuple[str, int]], expected: list[tuple[str, int]]) -> float:
    return len(set(found) & set(expected)) / len(expected)


async def test_the_index_finds_nearly_all_that_comparing_finds(indexed: Indexed) -> None:
    before = indexed.num_index_scans()
    queries = unit_vectors(20, 2)
    recalls = []
    for query in queries:
        hits = await nearest(indexed.store, query)
        assert [hit.score for hit in hits] == sorted((hit.score for hit in hits), reverse=True)
        recalls.append(recall([hit.key for hit in hits], indexed.nearest(query, 10)))
    assert np.mean(recalls) >= 0.98
    await indexed.store.close()  # whose connections tell what they used when they end
    assert indexed.num_index_scans() - before >= len(queries)


async def test_a_filter_that_leaves_many_is_answered_in_full(indexed: Indexed) -> None:
    for query in unit_vectors(10, 3):
        hits = await nearest(indexed.store, query, filter=where("is_even", Operator.EQ, True))
        expected = indexed.nearest(query, 10, range(0, NUM_DOCUMENTS, 2))
        assert recall([hit.key for hit in hits], expected) >= 0.9


async def test_a_filter_against_the_question_is_answered_in_full(indexed: Indexed) -> None:
    """No near chunk fulfils the filter, so the index finds too few."""
    query = unit_vectors(1, 4)[0]
    near = np.tile(query, (400, 1))
    await put(indexed.store, "near", ["text"] * 400, vectors=near, metadata={"is_near": True})
    hits = await nearest(indexed.store, query, filter=where("is_near", Operator.NE, True))
    assert [hit.key for hit in hits] == indexed.nearest(query, 10)


async def test_what_was_just_deleted_takes_no_places(indexed: Indexed) -> None:
    query = unit_vectors(1, 5)[0]
    await put(indexed.store, "near", ["text"] * 400, vectors=np.tile(query, (400, 1)))
    assert set(ids(await nearest(indexed.store, query))) == {"near"}
    await indexed.store.delete_document("docs", "near")
    assert [hit.key for hit in await nearest(indexed.store, query)] == indexed.nearest(query, 10)


async def test_more_chunks_than_the_index_examines_are_found(indexed: Indexed) -> None:
    query = unit_vectors(1, 6)[0]
    for limit in (500, 1100, 5000):
        assert len(await nearest(indexed.store, query, limit=limit)) == min(limit, len(indexed.vectors))


async def test_words_are_found_with_and_without_a_filter_among_many(indexed: Indexed) -> None:
    await put(indexed.store, "rare", ["text of a zebra"], metadata={"number": 99})
    assert ids(await matching(indexed.store, "text zebra", limit=1)) == ["rare"]
    hits = await matching(indexed.store, "text zebra", limit=500, filter=where("number", Operator.GTE, 10))
    assert set(ids(hits)) == {"d10", "d11", "rare"}
    assert len(hits) == 201
    assert all(hit.score > 0 for hit in hits)


@pytest.mark.parametrize(
    ("num_chunks", "num_all", "limit", "expected"),
    [
        (300, 300, 10, None),
        (301, 301, 10, 10),
        (100_000, 100_000, 400, 400),
        (100_000, 100_000, 1000, 1000),
        (100_000, 100_000, 1001, None),
        (50_000, 100_000, 40, 160),
        (8_000, 100_000, 40, 1000),
        (7_000, 100_000, 40, None),
    ],
)
def test_how_many_chunks_the_index_examines(num_chunks: int, num_all: int, limit: int, expected: int | None) -> None:
    row = CollectionRow(1, 10, CollectionInfo(CollectionSpec("docs", "encoder", 384), 1, num_all, 0.0))
    is_filtered = num_chunks < num_all
    scope = SearchScope(row, num_chunks, ("true", []) if is_filtered else None)
    assert index_search_width(scope, limit, TUNING.max_compared) == expected


def test_vectors_too_long_for_the_index_are_compared() -> None:
    row = CollectionRow(1, 10, CollectionInfo(CollectionSpec("docs", "encoder", 2001), 1, 10_000, 0.0))
    assert index_search_width(SearchScope(row, 10_000, None), 10, TUNING.max_compared) is None


async def test_an_index_that_finds_too_few_is_not_trusted(filled: str) -> None:
    """All are compared until the index, with a greater `ef_search` than 1, is known to find enough."""
    url = shared_server().url(shared_server().create_database(filled))
    store = PostgresStore(url, tuning=SearchTuning(max_compared=300, min_ef_search=1))
    await store.open()
    indexed = Indexed(store, url)
    recalls = []
    for number, query in enumerate(unit_vectors(120, 8)):
        hits = [hit.key for hit in await nearest(store, query)]
        recalls.append(recall(hits, indexed.nearest(query, 10)))
        assert number >= 64 or recalls[number] == 1.0
    assert np.mean(recalls[64:]) >= 0.95
    await store.close()
