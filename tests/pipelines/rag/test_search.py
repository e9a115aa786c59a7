from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice.errors import ErrorCode, SluiceError
from sluice.pipelines.rag.search import (
    SearchOptions,
    SearchQuery,
    add_similarities,
    diversify,
    drop_duplicates,
    fuse_rankings,
    mentions_subject,
    search,
    subject_words,
)
from sluice.pipelines.rag.stores.base import DocumentStore
from sluice.pipelines.rag.types import CandidateHits, CandidateQuery, Hit, RetrievalMode
from tests.pipelines.rag.hits import hit, names, near, unit

QUESTION = unit([1, 0])
TEXT = "A request that can never fit is refused at once, and the client hears of both of its sizes."


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


def test_the_same_text_in_two_documents_comes_once() -> None:
    again = hit("b", text=TEXT.upper().replace(",", " -"))
    assert names(drop_duplicates([hit("a", text=TEXT), again, hit("c")], 3)) == ["a", "c"]


def test_an_edit_or_two_make_no_other_text() -> None:
    long = " ".join(f"word{number}" for number in range(120))
    assert len(drop_duplicates([hit("a", text=long), hit("b", text=long.replace("word60 ", "changed "))], 2)) == 1
    changed = " ".join(f"word{number}" if number % 6 else "changed" for number in range(120))
    assert len(drop_duplicates([hit("a", text=long), hit("b", text=changed)], 2)) == 2


def test_a_text_that_says_more_is_kept_and_one_that_says_less_is_not() -> None:
    short, long = hit("short", text=TEXT), hit("long", text=f"{TEXT} {TEXT[::-1]}")
    assert names(drop_duplicates([short, long], 2)) == ["short", "long"]
    assert names(drop_duplicates([long, short], 2)) == ["long"]


def test_neighbours_share_their_overlap_and_both_stay() -> None:
    one = replace(hit("a", text="one"), start=0, end=700)
    other = replace(hit("a", index=1, text="other"), start=600, end=1300)
    assert len(drop_duplicates([one, other], 2)) == 2
    same_place = replace(hit("a", index=2, text="cut otherwise"), start=300, end=900)
    assert [each.chunk_index for each in drop_duplicates([one, other, same_place], 3)] == [0, 1]


def test_short_texts_are_the_same_only_when_they_are_equal() -> None:
    assert len(drop_duplicates([hit("a", text="See above."), hit("b", text="See below.")], 2)) == 2
    assert len(drop_duplicates([hit("a", text="See above."), hit("b", text="see above")], 2)) == 1


@given(st.lists(st.text("ab ", max_size=12)), st.integers(1, 5))
def test_what_is_kept_is_in_order_and_bounded_and_nothing_is_kept_twice(texts: list[str], limit: int) -> None:
    hits = [hit(f"d{index}", text=text or " ") for index, text in enumerate(texts)]
    found = drop_duplicates(hits, limit)
    assert len(found) <= limit
    assert found == [each for each in hits if each in found]
    assert drop_duplicates(found, limit) == found
    assert not hits or found[0] == hits[0]


TRADE_OFFS = st.floats(0, 1)


@st.composite
def rankings(draw: st.DrawFn) -> list[Hit]:
    """Draw a ranking, best first, with vectors of a few directions, so that some repeat others."""
    scores = sorted(draw(st.lists(st.floats(0, 100), max_size=8)), reverse=True)
    directions = [draw(st.integers(0, 2)) for _ in scores]
    vectors = np.eye(3)
    return [
        hit(f"d{index}", score, vector=vectors[direction].tolist())
        for index, (score, direction) in enumerate(zip(scores, directions, strict=True))
    ]


@given(rankings(), st.integers(0, 10), TRADE_OFFS)
def test_gives_as_many_as_asked_and_each_once(hits: list[Hit], limit: int, trade_off: float) -> None:
    found = diversify(hits, limit, trade_off)
    assert len(found) == min(limit, len(hits))
    assert len({each.key for each in found}) == len(found)


@given(rankings(), st.integers(1, 10))
def test_relevance_alone_keeps_the_ranking(hits: list[Hit], limit: int) -> None:
    assert names(diversify(hits, limit, 1.0)) == names(hits[:limit])


@given(rankings(), TRADE_OFFS)
def test_the_best_comes_first(hits: list[Hit], trade_off: float) -> None:
    if hits:
        assert diversify(hits, 1, trade_off) == hits[:1]


@given(rankings(), st.integers(1, 3))
def test_diversity_alone_takes_every_direction_before_it_repeats_one(hits: list[Hit], limit: int) -> None:
    directions = {tuple(each.vector.tolist()) for each in hits if each.vector is not None}
    found = diversify(hits, limit, 0.0)
    taken = [tuple(each.vector.tolist()) for each in found if each.vector is not None]
    assert len(set(taken)) == min(limit, len(directions))


def test_the_scale_of_scores_means_nothing() -> None:
    hits = [hit("a", 3.0, vector=[1, 0]), hit("again", 2.5, vector=[1, 0.2]), hit("new", 1.0, vector=[0, 1])]
    small = [replace(each, score=each.score / 1000 - 7) for each in hits]
    for trade_off in (0.2, 0.5, 0.8):
        assert names(diversify(hits, 3, trade_off)) == names(diversify(small, 3, trade_off))


def test_a_repetition_gives_way_to_something_new() -> None:
    hits = [hit("a", 1.0, vector=[1, 0]), hit("again", 0.9, vector=[1, 0.01]), hit("new", 0.5, vector=[0, 1])]
    assert names(diversify(hits, 2, 0.5)) == ["a", "new"]
    assert names(diversify(hits, 3, 0.5)) == ["a", "new", "again"]


def test_what_repeats_any_that_was_selected_gives_way_not_the_last_one_alone() -> None:
    hits = [hit("a", 1.0, vector=[1, 0]), hit("new", 0.9, vector=[0, 1]), hit("again", 0.8, vector=[1, 0])]
    hits.append(hit("other", 0.0, vector=[-1, -1]))
    assert names(diversify(hits, 3, 0.4)) == ["a", "new", "other"]


def test_a_chunk_without_a_vector_is_similar_to_no_other() -> None:
    hits = [hit("a", 1.0, vector=[1, 0]), hit("again", 0.9, vector=[1, 0]), hit("unknown", 0.5)]
    assert names(diversify(hits, 2, 0.5)) == ["a", "unknown"]


def test_subject_words_leave_out_common_words() -> None:
    assert subject_words("What does max_num_seqs do, and how is it set?") == {"max_num_seqs", "set"}
    assert subject_words("What is it?") == frozenset()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("The SHIPPING time of parcels", True),
        ("Nothing but time", False),
        ("shippings", False),
    ],
)
def test_a_chunk_mentions_half_of_the_words(text: str, expected: bool) -> None:
    assert mentions_subject(hit("d", text=text), frozenset({"shipping", "parcels", "days"})) is expected


def test_heading_and_title_count_too() -> None:
    words = frozenset({"queue", "limits"})
    assert mentions_subject(replace(hit("d", text="256"), heading="Limits"), words)
    assert mentions_subject(replace(hit("d", text="256"), title="Queue"), words)
    assert not mentions_subject(hit("d", text="256"), words)


def test_no_chunk_mentions_an_empty_subject() -> None:
    assert not mentions_subject(hit("d", text="anything"), frozenset())
