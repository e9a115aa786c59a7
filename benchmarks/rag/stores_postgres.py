"""The Postgres store compared with numpy's exact search, on random vectors and on clustered vectors.

HNSW is of no use for random vectors: the store detects that on the first queries and then compares all vectors. The
vectors of texts are clustered. The server is that of the tests, from the pgserver wheel; it does not wait for the disk.
"""

import asyncio
from dataclasses import replace

import numpy as np

from benchmarks.figures import Figure, ReportProgress, Target
from benchmarks.rag.stores import DIM, NUM_CHUNKS, NUM_QUERIES, VectorCorpus, make_corpus, measure_store
from sluice.pipelines.encoding import Vectors
from sluice.pipelines.rag.stores.postgres.store import PostgresStore
from sluice.state.postgres import ConnectionLimits
from tests.pipelines.rag.stores.postgres_fixture import PostgresServer

RECALL = Target(0.95, is_ceiling=False)
_NUM_TOPICS = 300
_NUM_LATENT = 40
"""Number of directions with most of the variance, the first with more than the last."""
_NOISE = 0.15
_LIMITS = ConnectionLimits(statement_timeout_s=60)


def measure(repeats: int, report: ReportProgress) -> list[Figure]:
    """Measure both kinds of vectors. `repeats` applies to the insertion, which takes minutes."""
    server = PostgresServer(shared_buffers="1GB")
    try:
        server.start()
        random_corpus = make_corpus()
        return [
            *asyncio.run(_measure(server, "Postgres, random vectors", random_corpus, repeats, report)),
            *asyncio.run(_measure(server, "Postgres, clustered vectors", _clustered(random_corpus), repeats, report)),
        ]
    finally:
        server.remove()


async def _measure(
    server: PostgresServer, subject: str, corpus: VectorCorpus, repeats: int, report: ReportProgress
) -> list[Figure]:
    store = PostgresStore(server.url(server.create_database()), _LIMITS)
    await store.open()
    try:
        return await measure_store(subject, store, corpus, RECALL, repeats, report)
    finally:
        await store.close()


def _clustered(corpus: VectorCorpus) -> VectorCorpus:
    """Return the same texts with vectors around topics in a space of fewer dimensions, and some noise in all."""
    draw = np.random.default_rng(1)
    topics = 0.8 * draw.normal(size=(_NUM_TOPICS, _NUM_LATENT))
    axes = draw.normal(size=(_NUM_LATENT, DIM)) / np.sqrt(np.arange(1, _NUM_LATENT + 1))[:, None]

    def vectors(num: int) -> Vectors:
        latent = topics[draw.integers(0, _NUM_TOPICS, num)] + draw.normal(size=(num, _NUM_LATENT))
        drawn = latent @ axes / np.sqrt(_NUM_LATENT) + _NOISE * draw.normal(size=(num, DIM))
        return np.asarray(drawn / np.linalg.norm(drawn, axis=1, keepdims=True), np.float32)

    return replace(corpus, vectors=vectors(NUM_CHUNKS), queries=vectors(NUM_QUERIES))
