from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from pipelines.rag.retrieval.search import SearchOptions, SearchQuery, search
from pipelines.rag.stores.base import Store
from pipelines.rag.types import CandidateHits, CandidateQuery, Hit, RetrievalMode
from sluice.errors import ErrorCode, SluiceError
from tests.pipelines.rag.retrieval.hits import hit, names, near, unit

QUESTION = unit([1, 0])


class OneAnswer:
    """A store's `candidates`, which is all of it that a search asks."""

    def __init__(self, by_vector: Sequence[Hit] = (), by_text: Sequence[Hit] = ()) -> None:
        self._candidates = CandidateHits(by_vector, by_text)
        self.asked: list[CandidateQuery] = []

    async def candidates(self, collection: str, query: CandidateQuery) -> CandidateHits:
        self.asked.append(query)
        return CandidateHits(
            self._candidates.by_vector if query.vector is not None else (),
            self._candidates.by_text if query.text is not None else (),
        )


class Reverse:
    """A reranker that likes best what came last, and keeps what it was asked."""

    def __init__(self) -> None:
        self.passages: list[str] = []

    async def scores(self, question: str, passages: Sequence[str]) -> list[float]:
        self.passages += passages
        return [float(place) for place in range(len(passages))]


async def found(store: OneAnswer, reranker: Any = None, question: str = "what is it?", **options: Any) -> list[Hit]:
    asked: Any = store
    query = SearchQuery(question, QUESTION)
    result: Sequence[Hit] = await search(_as_store(asked), "docs", query, SearchOptions(**options), reranker)
    return list(result)


def _as_store(store: Any) -> Store:
    made: Store = store
    return made


async def test_hybrid_fuses_both_rankings_of_one_call() -> None:
    store = OneAnswer([near("a", 0.9), near("b", 0.8)], [hit("b", 7.0), hit("c", 3.0)])
    hits = await found(store, top_k=3)
    assert names(hits) == ["b", "a", "c"]
    assert [each.similarity for each in hits] == [0.8, 0.9, None]
    (query,) = store.asked
    assert query.vector is QUESTION
    assert (query.text, query.limit, query.with_vectors) == ("what is it?", 40, False)


async def test_modes_ask_for_what_they_need() -> None:
    store = OneAnswer([near("a", 0.9)], [hit("b", 7.0)])
    assert names(await found(store, mode=RetrievalMode.VECTOR)) == ["a"]
    assert names(await found(store, mode=RetrievalMode.BM25)) == ["b"]
    assert [(each.vector is None, each.text is None) for each in store.asked] == [(False, True), (True, False)]


async def test_more_hits_than_candidates_widen_the_search() -> None:
    store = OneAnswer()
    await found(store, top_k=70)
    assert store.asked[0].limit == 70


async def test_dissimilar_chunks_are_not_found_unless_they_name_what_is_asked_about() -> None:
    named = _with_text(near("named", 0.1), "Here max_num_seqs is set.")
    by_chance = replace(_with_text(hit("chance", 9.0), "What it is, is what it does."), similarity=0.1)
    store = OneAnswer([near("near", 0.6), named, near("far", 0.1)], [by_chance, named])
    question = "What is max_num_seqs?"
    assert names(await found(store, question=question, min_similarity=0.3)) == ["named", "near"]
    assert names(await found(store, question=question, min_similarity=0.3, mode=RetrievalMode.VECTOR)) == ["near"]
    assert len(await found(store, question=question, min_similarity=0.0)) == 4


async def test_off_topic_questions_find_nothing() -> None:
    text = "What is the use of it? The capital letters are what it is of."
    store = OneAnswer([_with_text(near("a", 0.1), text)], [replace(_with_text(hit("a", 3.0), text), similarity=0.1)])
    assert await found(store, question="What is the capital city of France?", min_similarity=0.3) == []


async def test_top_k_cuts_after_duplicates_have_gone() -> None:
    same = "the very same words stand in both of these documents"
    first, again = (near(name, 0.9) for name in "ab")
    store = OneAnswer([_with_text(first, same), _with_text(again, same), near("c", 0.5)])
    assert names(await found(store, top_k=2, mode=RetrievalMode.VECTOR)) == ["a", "c"]


async def test_a_reranker_decides_the_order_and_the_scores() -> None:
    store, reranker = OneAnswer([near("a", 0.9), near("b", 0.8), near("c", 0.7)]), Reverse()
    hits = await found(store, reranker, top_k=2)
    assert names(hits) == ["c", "b"]
    assert [each.score for each in hits] == [2.0, 1.0]
    assert [each.similarity for each in hits] == [0.7, 0.8]


async def test_a_reranker_sees_as_many_passages_as_there_are_candidates_of_a_kind_with_their_headings() -> None:
    store, reranker = OneAnswer([replace(near("a", 0.9), heading="Start > Install")], [hit("b"), hit("c")]), Reverse()
    await found(store, reranker, top_k=1, num_candidates=2)
    assert reranker.passages == ["Start > Install\na 0", "b 0"]


async def test_a_reranker_is_not_asked_about_nothing() -> None:
    reranker = Reverse()
    assert await found(OneAnswer(), reranker) == []
    assert reranker.passages == []


async def test_mmr_asks_for_vectors_and_prefers_what_is_new() -> None:
    store = OneAnswer(
        [near("a", 0.9, vector=[1, 0]), near("again", 0.89, vector=[1, 0.01]), near("new", 0.5, vector=[0, 1])],
        [hit("a", 3.0, vector=[1, 0])],
    )
    assert names(await found(store, top_k=2)) == ["a", "again"]
    assert names(await found(store, top_k=2, mmr_lambda=0.3)) == ["a", "new"]
    assert [each.with_vectors for each in store.asked] == [False, True]


async def test_the_cosine_of_text_hits_is_known_where_their_vectors_are() -> None:
    (only,) = await found(OneAnswer((), [hit("a", vector=[1, 0])]), mmr_lambda=1.0)
    assert only.similarity == pytest.approx(1.0)


async def test_a_search_by_vector_needs_one() -> None:
    with pytest.raises(SluiceError, match="needs the question's vector") as caught:
        await search(_as_store(OneAnswer()), "docs", SearchQuery("?", None), SearchOptions())
    assert caught.value.code is ErrorCode.INVALID


def _with_text(of: Hit, text: str) -> Hit:
    return replace(of, text=text)
