"""One search: a store's candidates are fused into one ranking, reranked, deduplicated, diversified and cut."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from sluice.errors import invalid
from sluice.pipelines.encoding import Vector
from sluice.pipelines.rag.filters import Filter
from sluice.pipelines.rag.retrieval.diversity import diversify, drop_duplicates
from sluice.pipelines.rag.stores.base import DocumentStore
from sluice.pipelines.rag.types import CandidateHits, CandidateQuery, Hit, RetrievalMode

MAX_TOP_K = 100
MAX_CANDIDATES = 1000
MAX_QUESTION_CHARS = 262_144
"""Each additional million characters would block the event loop, and so all clients, for about a second."""
_WORD = re.compile(r"\w+")
_COMMON = frozenset(
    _WORD.findall(
        "a about all also an and any are as at be been but by can could did do does doing done for from get give had "
        "has have he her his how i if in into is it its just let many may me mean means might more most much must my "
        "no not of on one or other our out please say says shall she should so some such tell than that the their "
        "them then there these they this those to up us use used using was we were what when where which while who "
        "whom whose why will with would you your"
    )
)
"""English words that do not tell what a question is about; nearly every text has some of them."""


@dataclass(frozen=True, slots=True)
class SearchOptions:
    """Options of a search. Each ranking brings `num_candidates` chunks into fusion, or `top_k` if that is more.

    Chunks whose similarity to the question is below `min_similarity` are dropped, except in hybrid mode those that
    mention its subject. `mmr_lambda` weighs relevance (1) against diversity (0); None turns maximal marginal relevance
    off. `rrf_k` is the constant of reciprocal rank fusion, the weights are those of its two rankings.
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
    """A question and the filter on documents. The modes vector and hybrid need its `vector`."""

    question: str
    vector: Vector | None
    filter: Filter | None = None


class Reranker(Protocol):
    """Scores passages against a question. Higher is better."""

    async def scores(self, question: str, passages: Sequence[str]) -> list[float]:
        """Return one score for each passage. Raises SluiceError UNAVAILABLE, which names the model."""
        ...


def check_question(question: str) -> None:
    """Check a question's length. Raises SluiceError INVALID."""
    if len(question) > MAX_QUESTION_CHARS:
        raise invalid("question", f"question must be at most {MAX_QUESTION_CHARS} characters, got {len(question)}")


async def search(
    store: DocumentStore, collection: str, query: SearchQuery, options: SearchOptions, reranker: Reranker | None = None
) -> list[Hit]:
    """Return at most `options.top_k` chunks, best first. Raises what the store and the reranker raise."""
    candidates = await store.candidates(collection, _candidate_query(query, options))
    ranked = _rank(candidates, query, options)
    if reranker is not None and ranked:
        ranked = await _rerank(ranked[: _num_candidates(options)], query.question, reranker)
    return _select(ranked, options)


def _rank(candidates: CandidateHits, query: SearchQuery, options: SearchOptions) -> list[Hit]:
    """Make one ranking of a store's two, without hits that are not similar enough."""
    match options.mode:
        case RetrievalMode.BM25:
            return list(candidates.by_text)
        case RetrievalMode.VECTOR:
            return [hit for hit in candidates.by_vector if hit.score >= options.min_similarity]
        case RetrievalMode.HYBRID:
            rankings = (candidates.by_vector, candidates.by_text)
            weights = (options.vector_weight, options.text_weight)
            hits = add_similarities(fuse_rankings(rankings, weights, options.rrf_k), query.vector)
            words = subject_words(query.question)
            return [hit for hit in hits if _is_similar(hit, options) or mentions_subject(hit, words)]


def _select(ranked: Sequence[Hit], options: SearchOptions) -> list[Hit]:
    """Return the `top_k` best hits of a ranking that repeat no better one, diversified if the options ask for it."""
    if options.mmr_lambda is None:
        return drop_duplicates(ranked, options.top_k)
    distinct = drop_duplicates(ranked, len(ranked))
    return diversify(distinct, options.top_k, options.mmr_lambda)


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
    """Whether the hit is similar enough. A hit without a similarity was found by its words, and passes."""
    return hit.similarity is None or hit.similarity >= options.min_similarity


async def _rerank(hits: Sequence[Hit], question: str, reranker: Reranker) -> list[Hit]:
    """Order hits by the reranker's scores. Equal scores keep their order."""
    scores = await reranker.scores(question, [_format_passage(hit) for hit in hits])
    scored = [replace(hit, score=score) for hit, score in zip(hits, scores, strict=True)]
    return sorted(scored, key=lambda hit: hit.score, reverse=True)


def _format_passage(hit: Hit) -> str:
    """Put the chunk under its headings: without them its text may not tell its subject."""
    return f"{hit.heading}\n{hit.text}" if hit.heading else hit.text


def fuse_rankings(rankings: Sequence[Sequence[Hit]], weights: Sequence[float], k: int) -> list[Hit]:
    """Fuse rankings by reciprocal ranks (Cormack, Clarke and Büttcher, 2009): each chunk once, best first.

    A chunk's score is the sum of weight / (k + rank) over the rankings, ranks from 1. Only ranks count, since cosines
    and BM25 have no common scale. Equal scores stay in the order of the earlier ranking. A chunk keeps its similarity
    and its vector whichever ranking has them.
    """
    scores: dict[tuple[str, int], float] = {}
    hits: dict[tuple[str, int], Hit] = {}
    for ranking, weight in zip(rankings, weights, strict=True):
        for rank, hit in enumerate(ranking, 1):
            scores[hit.key] = scores.get(hit.key, 0.0) + weight / (k + rank)
            before = hits.get(hit.key)
            hits[hit.key] = hit if before is None else _merge_hits(before, hit)
    ordered = sorted(hits, key=scores.__getitem__, reverse=True)
    return [replace(hits[key], score=scores[key]) for key in ordered]


def add_similarities(hits: Sequence[Hit], vector: Vector | None) -> list[Hit]:
    """Compute the cosine to `vector` for each hit that has a vector and no similarity yet."""
    if vector is None:
        return list(hits)
    return [
        replace(hit, similarity=float(hit.vector @ vector))
        if hit.similarity is None and hit.vector is not None
        else hit
        for hit in hits
    ]


def _merge_hits(one: Hit, other: Hit) -> Hit:
    similarity = one.similarity if one.similarity is not None else other.similarity
    return replace(one, similarity=similarity, vector=one.vector if one.vector is not None else other.vector)


def subject_words(question: str) -> frozenset[str]:
    """Return the words that tell what the question is about. Names like `max_num_seqs` stay whole."""
    return frozenset(_WORD.findall(question.casefold())) - _COMMON


def mentions_subject(hit: Hit, words: frozenset[str]) -> bool:
    """Whether chunk, heading and title contain at least half of `words`. One of several may be there by chance."""
    if not words:
        return False
    found = words.intersection(_WORD.findall(f"{hit.title} {hit.heading} {hit.text}".casefold()))
    return 2 * len(found) >= len(words)
