"""Vector stores with 100,000 random vectors, compared with numpy's exact search: recall, latency, insertion.

Random unit vectors of 384 dimensions are the worst case of an approximate index: no two are much nearer than others.
"""

import asyncio
import statistics
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import numpy.typing as npt

from benchmarks.figures import Figure, ReportProgress, Target
from sluice.pipelines.encoding import Vector, Vectors
from sluice.pipelines.rag.filters import Condition, Filter, Operator
from sluice.pipelines.rag.stores.base import DocumentStore
from sluice.pipelines.rag.stores.sqlite.store import SqliteStore
from sluice.pipelines.rag.types import (
    CandidateQuery,
    CollectionSpec,
    DocumentChunk,
    DocumentFormat,
    DocumentInfo,
    Hit,
    StoredDocument,
)

NUM_CHUNKS = 100_000
DIM = 384
CHUNKS_A_DOCUMENT = 10
TOP_K = 10
NUM_QUERIES = 200
NUM_PARTS = 10
"""Number of values of the metadata key `part`: a filter on one value leaves a tenth of the chunks."""
_WORDS_A_CHUNK = 60
_VOCABULARY = 30_000
_COLLECTION = "benchmark"
EXACT = Target(1.0, is_ceiling=False)

Ask = Callable[[int], Awaitable[Sequence[Hit]]]


@dataclass(frozen=True, slots=True)
class VectorCorpus:
    """Chunks with `vectors` [NUM_CHUNKS, DIM] and `texts`; `queries` [NUM_QUERIES, DIM] with their `questions`."""

    vectors: Vectors
    texts: Sequence[str]
    queries: Vectors
    questions: Sequence[str]

    def document(self, number: int) -> tuple[StoredDocument, list[DocumentChunk], Vectors]:
        rows = slice(number * CHUNKS_A_DOCUMENT, (number + 1) * CHUNKS_A_DOCUMENT)
        texts = self.texts[rows]
        chunks = [DocumentChunk(index, text, "", 0, len(text), _WORDS_A_CHUNK) for index, text in enumerate(texts)]
        info = DocumentInfo(
            id=f"{number:06}",
            title=f"document {number}",
            format=DocumentFormat.TEXT,
            content_hash="",
            num_chars=sum(map(len, texts)),
            num_chunks=len(chunks),
            metadata={"part": number % NUM_PARTS},
        )
        return StoredDocument(info, "\n".join(texts)), chunks, self.vectors[rows]

    @property
    def num_documents(self) -> int:
        return len(self.texts) // CHUNKS_A_DOCUMENT

    def nearest(self, query: Vector, part: int | None = None) -> list[int]:
        """Return the rows of the TOP_K nearest chunks, of one part or of all, by numpy's exact search."""
        cosines = self.vectors @ query
        if part is not None:
            documents = np.arange(len(self.vectors)) // CHUNKS_A_DOCUMENT
            cosines = np.where(documents % NUM_PARTS == part, cosines, -np.inf)
        best = np.argpartition(-cosines, TOP_K)[:TOP_K]
        return [int(row) for row in best[np.argsort(-cosines[best])]]


def make_corpus() -> VectorCorpus:
    """Make the corpus, the same for every store. The n-th word has a frequency of 1/n, as in natural languages."""
    draw = np.random.default_rng(0)
    shares = 1 / np.arange(1, _VOCABULARY + 1)
    drawn = draw.choice(_VOCABULARY, (NUM_CHUNKS, _WORDS_A_CHUNK), p=shares / shares.sum())
    asked = draw.choice(_VOCABULARY, (NUM_QUERIES, 8), p=shares / shares.sum())
    return VectorCorpus(_units(draw, NUM_CHUNKS), _texts(drawn), _units(draw, NUM_QUERIES), _texts(asked))


def measure(repeats: int, report: ReportProgress) -> list[Figure]:
    """Measure numpy and the SQLite store. `repeats` applies to the insertion."""
    corpus = make_corpus()
    figures = _latency("numpy", "vector search", _numpy_ms(corpus))
    with TemporaryDirectory(prefix="sluice-stores-") as folder:
        path = Path(folder, "rag.sqlite")
        figures += asyncio.run(_measure_sqlite(path, corpus, repeats, report))
        size_mb = path.stat().st_size / 1e6
    return [*figures, Figure(f"file of {NUM_CHUNKS:,} chunks", "SQLite", "MB", (size_mb,))]


async def measure_store(
    subject: str, store: DocumentStore, corpus: VectorCorpus, recall: Target, repeats: int, report: ReportProgress
) -> list[Figure]:
    """Measure an open, empty store. `recall` is the target for the share of numpy's ten that it finds."""
    rates = []
    for repeat in range(repeats):
        report(f"{subject}: inserting {NUM_CHUNKS:,} chunks, {repeat + 1} of {repeats}")
        rates.append(await _insert(store, corpus))
    report(f"{subject}: {NUM_QUERIES} queries of each kind")
    return [
        Figure("documents of 10 chunks put one by one", subject, "chunks/s", tuple(rates)),
        *await _vector_figures(subject, store, corpus, recall),
        *await _filtered_figures(subject, store, corpus, recall),
        *await _text_figures(subject, store, corpus),
    ]


async def _measure_sqlite(path: Path, corpus: VectorCorpus, repeats: int, report: ReportProgress) -> list[Figure]:
    store = SqliteStore(path)
    await store.open()
    try:
        return await measure_store("SQLite", store, corpus, EXACT, repeats, report)
    finally:
        await store.close()


async def _insert(store: DocumentStore, corpus: VectorCorpus) -> float:
    """Insert all chunks into a new collection. Returns chunks per second."""
    if _COLLECTION in [info.spec.name for info in await store.collections()]:
        await store.delete_collection(_COLLECTION)
    await store.create_collection(CollectionSpec(_COLLECTION, "random", DIM))
    started = time.perf_counter()
    for number in range(corpus.num_documents):
        await store.put_document(_COLLECTION, *corpus.document(number))
    return NUM_CHUNKS / (time.perf_counter() - started)


async def _vector_figures(subject: str, store: DocumentStore, corpus: VectorCorpus, recall: Target) -> list[Figure]:
    async def ask(number: int) -> Sequence[Hit]:
        return (await store.candidates(_COLLECTION, CandidateQuery(corpus.queries[number], None, TOP_K))).by_vector

    answers, times_ms = await _run_queries(ask)
    found = _recall(answers, [corpus.nearest(query) for query in corpus.queries])
    return [Figure("recall@10", subject, "", (found,), recall), *_latency(subject, "vector search", times_ms)]


async def _filtered_figures(subject: str, store: DocumentStore, corpus: VectorCorpus, recall: Target) -> list[Figure]:
    def query(number: int) -> CandidateQuery:
        part = Filter((Condition("part", Operator.EQ, number % NUM_PARTS),))
        return CandidateQuery(corpus.queries[number], None, TOP_K, part)

    async def ask(number: int) -> Sequence[Hit]:
        return (await store.candidates(_COLLECTION, query(number))).by_vector

    answers, times_ms = await _run_queries(ask)
    right = [corpus.nearest(vector, number % NUM_PARTS) for number, vector in enumerate(corpus.queries)]
    return [
        Figure("recall@10 within a tenth", subject, "", (_recall(answers, right),), recall),
        *_latency(subject, "vector search within a tenth", times_ms),
    ]


async def _text_figures(subject: str, store: DocumentStore, corpus: VectorCorpus) -> list[Figure]:
    async def by_text(number: int) -> Sequence[Hit]:
        return (await store.candidates(_COLLECTION, CandidateQuery(None, corpus.questions[number], TOP_K))).by_text

    async def hybrid(number: int) -> Sequence[Hit]:
        query = CandidateQuery(corpus.queries[number], corpus.questions[number], 40)
        return (await store.candidates(_COLLECTION, query)).by_vector

    return [
        *_latency(subject, "BM25, 8 words", (await _run_queries(by_text))[1]),
        *_latency(subject, "both, 40 of each", (await _run_queries(hybrid))[1]),
    ]


async def _run_queries(ask: Ask) -> tuple[list[Sequence[Hit]], list[float]]:
    """Run all queries one after the other, after one to warm up. Returns the answers and their milliseconds."""
    await ask(0)
    answers, times_ms = [], []
    for number in range(NUM_QUERIES):
        started = time.perf_counter()
        answers.append(await ask(number))
        times_ms.append((time.perf_counter() - started) * 1e3)
    return answers, times_ms


def _numpy_ms(corpus: VectorCorpus) -> list[float]:
    times_ms = []
    for query in corpus.queries:
        started = time.perf_counter()
        corpus.nearest(query)
        times_ms.append((time.perf_counter() - started) * 1e3)
    return times_ms


def _latency(subject: str, what: str, times_ms: Sequence[float]) -> list[Figure]:
    p99 = statistics.quantiles(times_ms, n=100)[98]
    return [
        Figure(f"{what}, median", subject, "ms", (statistics.median(times_ms),)),
        Figure(f"{what}, p99", subject, "ms", (p99,)),
    ]


def _recall(answers: Sequence[Sequence[Hit]], right: Sequence[Sequence[int]]) -> float:
    """Return the share of the right chunks that were found."""
    num_found = sum(len({_row(hit) for hit in hits} & set(rows)) for hits, rows in zip(answers, right, strict=True))
    return num_found / sum(map(len, right))


def _row(hit: Hit) -> int:
    return int(hit.document_id) * CHUNKS_A_DOCUMENT + hit.chunk_index


def _units(draw: np.random.Generator, num: int) -> Vectors:
    drawn = draw.normal(size=(num, DIM)).astype(np.float32)
    return np.asarray(drawn / np.linalg.norm(drawn, axis=1, keepdims=True), np.float32)


def _texts(drawn: npt.NDArray[np.int64]) -> list[str]:
    return [" ".join(f"w{number}" for number in row) for row in drawn.tolist()]
