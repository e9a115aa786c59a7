from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice.errors import ErrorCode, SluiceError
from sluice.pipelines.rag.retrieval.search import SearchOptions, SearchQuery, add_similarities, fuse_rankings, search
from sluice.pipelines.rag.stores.base import DocumentStore
from sluice.pipelines.rag.types import CandidateHits, CandidateQuery, Hit, RetrievalMode
from tests.pipelines.rag.retrieval.hits import hit, names, near, unit

QUESTION = unit([1, 0])


class OneAnswer:
    """A store whose `candidates`, the only method that a search calls, returns fixed rankings."""

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
    """A reranker that reverses the order, and records passages."""

    def __init__(self) -> None:
        self.passages: list[str] = []

    async def scores(self, question: str, passages: Sequence[str]) -> list[float]:
        self.passages += passages
        return [float(place) for place in range(len(passages))]


async def found(store: OneAnswer, reranker: Any = None, question: str = "what is it?", **options: Any) -> list[Hit]:
    query = SearchQuery(question, QUESTION)
    return await search(cast(DocumentStore, store), "docs", query, SearchOptions(**options), reranker)


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
        await search(cast(DocumentStore, OneAnswer()), "docs", SearchQuery("?", None), SearchOptions())
    assert caught.value.code is ErrorCode.INVALID


def _with_text(of: Hit, text: str) -> Hit:
    return replace(of, text=text)


RANKINGS = st.lists(st.lists(st.sampled_from("abcdefgh"), unique=True), min_size=1, max_size=3)


def ranked(documents: list[str]) -> list[Hit]:
    return [hit(document) for document in documents]


def equal_weights(rankings: list[list[Hit]]) -> list[float]:
    return [1.0] * len(rankings)


@given(RANKINGS)
def test_each_chunk_comes_once_best_first(documents: list[list[str]]) -> None:
    rankings = [ranked(each) for each in documents]
    found = fuse_rankings(rankings, equal_weights(rankings), 60)
    assert sorted(names(found)) == sorted({name for each in documents for name in each})
    assert [each.score for each in found] == sorted((each.score for each in found), reverse=True)


@given(st.lists(st.sampled_from("abcdefgh"), unique=True, min_size=1), st.integers(1, 100))
def test_rankings_that_agree_stay_as_they_are(documents: list[str], k: int) -> None:
    ranking = ranked(documents)
    assert names(fuse_rankings([ranking, ranking], [1.0, 1.0], k)) == documents


@given(RANKINGS, st.data())
def test_a_better_place_never_lowers_a_score(documents: list[list[str]], data: st.DataObject) -> None:
    ranking = documents[0]
    if len(ranking) < 2:
        return
    place = data.draw(st.integers(1, len(ranking) - 1))
    raised = [*ranking[: place - 1], ranking[place], ranking[place - 1], *ranking[place + 1 :]]

    def score(first: list[str]) -> float:
        rankings = [ranked(first), *map(ranked, documents[1:])]
        found = fuse_rankings(rankings, equal_weights(rankings), 60)
        return next(each.score for each in found if each.document_id == ranking[place])

    assert score(raised) >= score(ranking)


def test_scores_are_sums_of_reciprocal_places() -> None:
    found = fuse_rankings([ranked(["a", "b"]), ranked(["b"])], [1.0, 1.0], 60)
    assert names(found) == ["b", "a"]
    assert found[0].score == pytest.approx(1 / 62 + 1 / 61)
    assert found[1].score == pytest.approx(1 / 61)


def test_weights_decide_between_rankings() -> None:
    assert names(fuse_rankings([ranked(["a"]), ranked(["b"])], [1.0, 2.0], 60)) == ["b", "a"]
    assert names(fuse_rankings([ranked(["a"]), ranked(["b"])], [2.0, 1.0], 60)) == ["a", "b"]


def test_equals_stand_as_in_the_earlier_ranking() -> None:
    assert names(fuse_rankings([ranked(["b"]), ranked(["a"])], [1.0, 1.0], 60)) == ["b", "a"]


def test_a_chunk_keeps_what_either_ranking_knows() -> None:
    (found,) = fuse_rankings([[near("a", 0.7)], [hit("a", 12.5, vector=[1, 0])]], [1.0, 1.0], 60)
    assert found.similarity == 0.7
    assert found.vector is not None
    (found,) = fuse_rankings([[hit("a", 12.5)], [near("a", 0.7)]], [1.0, 1.0], 60)
    assert found.similarity == 0.7


def test_chunks_of_one_document_are_several() -> None:
    assert len(fuse_rankings([[hit("a", index=0), hit("a", index=1)]], [1.0], 60)) == 2


def test_missing_similarities_are_computed_from_vectors() -> None:
    question = unit([1, 1])
    given, computed, unknown = add_similarities(
        [near("a", 0.5, vector=[1, 0]), hit("b", vector=[1, 1]), hit("c")], question
    )
    assert given.similarity == 0.5
    assert computed.similarity == pytest.approx(1.0)
    assert unknown.similarity is None
    assert add_similarities([hit("b", vector=[1, 1])], None)[0].similarity is None
