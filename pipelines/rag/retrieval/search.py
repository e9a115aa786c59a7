"""One search: candidates from a store, fused, reranked, made diverse, cut."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from pipelines.rag.filters import Filter
from pipelines.rag.retrieval.duplicates import without_duplicates
from pipelines.rag.retrieval.fusion import fused, with_similarity
from pipelines.rag.retrieval.matching import names, subjects
from pipelines.rag.retrieval.mmr import diversified
from pipelines.rag.stores.base import Store
from pipelines.rag.types import CandidateHits, CandidateQuery, Hit, RetrievalMode, Vector
from sluice.errors import invalid

MAX_TOP_K = 100
MAX_CANDIDATES = 1000
MAX_QUESTION_CHARS = 262_144
"""Each million characters more would hold the event loop, and so everybody, for about a second."""


@dataclass(frozen=True, slots=True)
class SearchOptions:
    """How a search goes. `num_candidates` of each kind before fusion, or top_k where that is more.

    `min_similarity`: chunks less similar to the question are not found at all, in the mode hybrid unless they name what
    it is about; `mmr_lambda` None: no maximal marginal relevance, else 1 is relevance alone, 0 diversity alone. `rrf_k`
    is reciprocal rank fusion's, the weights are those of its two rankings.
    """

    mode: RetrievalMode = RetrievalMode.HYBRID
    top_k: int = 4
    num_candidates: int = 40
    rrf_k: int = 60
    min_similarity: float = 0.0
    mmr_lambda: float | None = None
    vector_weight: float = 1.0
    text_weight: float = 1.0


@dataclass(frozen=True, slots=True)
class SearchQuery:
    """`vector` is needed in the modes vector and hybrid."""

    question: str
    vector: Vector | None
    filter: Filter | None = None


class Reranker(Protocol):
    """Scores passages against a question, higher is better."""

    async def scores(self, question: str, passages: Sequence[str]) -> list[float]:
        """One for each passage. Raises SluiceError UNAVAILABLE, which names the model."""
        ...


def check_question(question: str) -> None:
    """Raises SluiceError INVALID for one that is too long."""
    if len(question) > MAX_QUESTION_CHARS:
        raise invalid("question", f"question must be at most {MAX_QUESTION_CHARS} characters, got {len(question)}")


async def search(
    store: Store, collection: str, query: SearchQuery, options: SearchOptions, reranker: Reranker | None = None
) -> list[Hit]:
    """At most `options.top_k` chunks, best first. Raises what the store and the reranker raise."""
    candidates = await store.candidates(collection, _candidate_query(query, options))
    ranked = rank(candidates, query, options)
    if reranker is not None and ranked:
        ranked = await _reranked(ranked[: _num_candidates(options)], query.question, reranker)
    return cut(ranked, options)


def rank(candidates: CandidateHits, query: SearchQuery, options: SearchOptions) -> list[Hit]:
    """One ranking of a store's two, without what is not similar enough. Pure."""
    match options.mode:
        case RetrievalMode.BM25:
            return list(candidates.by_text)
        case RetrievalMode.VECTOR:
            return [hit for hit in candidates.by_vector if hit.score >= options.min_similarity]
        case RetrievalMode.HYBRID:
            rankings = (candidates.by_vector, candidates.by_text)
            weights = (options.vector_weight, options.text_weight)
            hits = with_similarity(fused(rankings, weights, options.rrf_k), query.vector)
            words = subjects(query.question)
            return [hit for hit in hits if _is_similar(hit, options) or names(hit, words)]


def cut(ranked: Sequence[Hit], options: SearchOptions) -> list[Hit]:
    """The `top_k` best hits of a ranking that repeat no better one, diverse where that is wanted. Pure."""
    if options.mmr_lambda is None:
        return without_duplicates(ranked, options.top_k)
    distinct = without_duplicates(ranked, len(ranked))
    return diversified(distinct, options.top_k, options.mmr_lambda)


def _candidate_query(query: SearchQuery, options: SearchOptions) -> CandidateQuery:
    by_vector, by_text = options.mode is not RetrievalMode.BM25, options.mode is not RetrievalMode.VECTOR
    if by_vector and query.vector is None:
        raise invalid("query_embeddings", f"a search in mode {options.mode} needs the question's vector")
    return CandidateQuery(
        vector=query.vector if by_vector else None,
        text=query.question if by_text else None,
        limit=_num_candidates(options),
        filter=query.filter,
        with_vectors=options.mmr_lambda is not None,
    )


def _num_candidates(options: SearchOptions) -> int:
    return max(options.num_candidates, options.top_k)


def _is_similar(hit: Hit, options: SearchOptions) -> bool:
    """Whether nothing speaks against it: where no one has compared it, its words were found."""
    return hit.similarity is None or hit.similarity >= options.min_similarity


async def _reranked(hits: Sequence[Hit], question: str, reranker: Reranker) -> list[Hit]:
    """By the reranker's scores; equal ones stay in the order in which they were."""
    scores = await reranker.scores(question, [_passage(hit) for hit in hits])
    scored = [replace(hit, score=score) for hit, score in zip(hits, scores, strict=True)]
    return sorted(scored, key=lambda hit: hit.score, reverse=True)


def _passage(hit: Hit) -> str:
    """The chunk under its headings: without them it may not say what it is about."""
    return f"{hit.heading}\n{hit.text}" if hit.heading else hit.text
