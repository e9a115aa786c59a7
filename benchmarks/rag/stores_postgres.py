"""The Postgres store beside numpy's exact search, on vectors that lie anywhere and on vectors that lie in clusters.

Where they lie anywhere, HNSW is no use, and the store, which finds that out on the first questions, compares all. Those
of texts lie in clusters. The server is the one of the tests, from the pgserver wheel; it does not wait for the disk.
"""

import asyncio
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from benchmarks.figures import Figure, Target
from benchmarks.rag.stores import DIM, NUM_CHUNKS, NUM_QUERIES, Corpus, corpus, measure_store
from pipelines.rag.stores.postgres.connections import ConnectionLimits
from pipelines.rag.stores.postgres.store import PostgresStore
from pipelines.rag.types import Vectors
from tests.pipelines.rag.stores.postgres_fixture import PostgresServer

RECALL = Target(0.95, is_ceiling=False)
_NUM_TOPICS = 300
_NUM_LATENT = 40
"""Directions that carry the most, the first more than the last."""
_NOISE = 0.15
_PATIENT = ConnectionLimits(statement_timeout_s=60)


def measure(repeats: int, say: Callable[[str], None]) -> list[Figure]:
    """Figures of both kinds of vectors; `repeats` are those of the insertion, minutes each."""
    server = PostgresServer(shared_buffers="1GB")
    try:
        server.start()
        anywhere = corpus()
        return [
            *asyncio.run(_measure(server, "Postgres, random vectors", anywhere, repeats, say)),
            *asyncio.run(_measure(server, "Postgres, clustered vectors", _clustered(anywhere), repeats, say)),
        ]
    finally:
        server.remove()


async def _measure(
    server: PostgresServer, subject: str, given: Corpus, repeats: int, say: Callable[[str], None]
) -> list[Figure]:
    store = PostgresStore(server.url(server.create_database()), _PATIENT)
    await store.open()
    try:
        return await measure_store(subject, store, given, RECALL, repeats, say)
    finally:
        await store.close()


def _clustered(given: Corpus) -> Corpus:
    """The same texts, with vectors around the topics of a space of fewer dimensions, and some noise in all."""
    draw = np.random.default_rng(1)
    topics = 0.8 * draw.normal(size=(_NUM_TOPICS, _NUM_LATENT))
    axes = draw.normal(size=(_NUM_LATENT, DIM)) / np.sqrt(np.arange(1, _NUM_LATENT + 1))[:, None]

    def vectors(num: int) -> Vectors:
        latent = topics[draw.integers(0, _NUM_TOPICS, num)] + draw.normal(size=(num, _NUM_LATENT))
        drawn = latent @ axes / np.sqrt(_NUM_LATENT) + _NOISE * draw.normal(size=(num, DIM))
        return np.asarray(drawn / np.linalg.norm(drawn, axis=1, keepdims=True), np.float32)

    return replace(given, vectors=vectors(NUM_CHUNKS), queries=vectors(NUM_QUERIES))
