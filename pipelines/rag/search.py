"""One search: a store's candidates are fused into one ranking, reranked, deduplicated, diversified and cut."""

import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from sluice.errors import invalid
from sluice.pipelines.encoding import Vector, Vectors
from sluice.pipelines.encoding.reranker import ModelReranker
from sluice.pipelines.rag.filters import Filter
from sluice.pipelines.rag.stores.base import DocumentStore
from sluice.pipelines.rag.types import CandidateHits, CandidateQuery, Hit, RetrievalMode

_RUN_WORDS = 5
"""Consecutive words by which texts are compared: shorter runs coincide by chance."""
_SAME_TEXT = 0.9
"""Share of a text's runs found in another one from which both count as the same text, give or take an edit or two."""
_OVERLAP = 0.5
"""Share of a chunk's characters within another chunk of its document from which it is a repetition.

Neighbours share far less: chunks are cut with an overlap of a seventh of their length.
"""
_Run = tuple[str, ...]
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


def drop_duplicates(hits: Sequence[Hit], limit: int) -> list[Hit]:
    """Return the first `limit` hits that repeat none before them, in order: a repetition would only take the place of
    another chunk in the prompt."""
    kept: list[Hit] = []
    index = _RunIndex()
    for hit in hits:
        if len(kept) == limit:
            break
        runs = _split_runs(hit.text)
        if not index.has_text_with(runs) and not any(_overlap(hit, other) for other in kept):
            kept.append(hit)
            index.add(runs)
    return kept


class _RunIndex:
    """Finds texts by their runs of words."""

    def __init__(self) -> None:
        self._num_texts = 0
        self._texts_by_run: defaultdict[_Run, list[int]] = defaultdict(list)

    def add(self, runs: frozenset[_Run]) -> None:
        for run in runs:
            self._texts_by_run[run].append(self._num_texts)
        self._num_texts += 1

    def has_text_with(self, runs: frozenset[_Run]) -> bool:
        """Whether one text contains nearly all of `runs`, however many more it has."""
        shared = Counter(text for run in runs for text in self._texts_by_run.get(run, ()))
        return max(shared.values(), default=0) >= _SAME_TEXT * len(runs)


def _split_runs(text: str) -> frozenset[_Run]:
    words = _WORD.findall(text.casefold())
    return frozenset(tuple(words[start : start + _RUN_WORDS]) for start in range(max(len(words) - _RUN_WORDS + 1, 1)))


def _overlap(hit: Hit, other: Hit) -> bool:
    if hit.document_id != other.document_id:
        return False
    shared = min(hit.end, other.end) - max(hit.start, other.start)
    return shared > 0 and shared >= _OVERLAP * min(hit.end - hit.start, other.end - other.start)


def diversify(hits: Sequence[Hit], limit: int, trade_off: float) -> list[Hit]:
    """Select at most `limit` hits by maximal marginal relevance (Carbonell and Goldstein, 1998), in order of selection.

    Each step selects the hit with the highest `trade_off` * relevance - (1 - `trade_off`) * similarity to the nearest
    selected hit; the earlier one wins a tie. Relevance is the score scaled to 0..1, the range of cosines, so that the
    trade-off means the same after fusion and after a reranker. A hit without a vector is similar to no other.
    """
    if not hits or limit <= 0:
        return []
    vectors = _stack_vectors(hits)
    relevance = _scale_to_unit(np.array([hit.score for hit in hits], np.float64))
    nearest = np.zeros(len(hits))
    is_open = np.ones(len(hits), np.bool_)
    selected: list[int] = []
    while len(selected) < min(limit, len(hits)):
        gains = trade_off * relevance - (1.0 - trade_off) * nearest if selected else relevance
        best = int(np.argmax(np.where(is_open, gains, -np.inf)))
        selected.append(best)
        is_open[best] = False
        nearest = np.maximum(nearest, vectors @ vectors[best])
    return [hits[index] for index in selected]


def _scale_to_unit(scores: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    low, high = scores.min(), scores.max()
    return (scores - low) / (high - low) if high > low else np.ones_like(scores)


def _stack_vectors(hits: Sequence[Hit]) -> Vectors:
    """Return one row for each hit, of zeros for a hit without a vector."""
    dim = next((len(hit.vector) for hit in hits if hit.vector is not None), 1)
    rows = np.zeros((len(hits), dim), np.float32)
    for row, hit in zip(rows, hits, strict=True):
        if hit.vector is not None:
            row[:] = hit.vector
    return rows


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


def check_question(question: str) -> None:
    """Check a question's length. Raises SluiceError INVALID."""
    if len(question) > MAX_QUESTION_CHARS:
        raise invalid("question", f"question must be at most {MAX_QUESTION_CHARS} characters, got {len(question)}")


async def search(
    store: DocumentStore,
    collection: str,
    query: SearchQuery,
    options: SearchOptions,
    reranker: ModelReranker | None = None,
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


async def _rerank(hits: Sequence[Hit], question: str, reranker: ModelReranker) -> list[Hit]:
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
