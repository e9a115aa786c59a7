import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipelines.rag.retrieval.search import add_similarities, fuse_rankings
from pipelines.rag.types import Hit
from tests.pipelines.rag.retrieval.hits import hit, names, near, unit

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


def test_similarity_is_worked_out_of_vectors_where_nobody_told() -> None:
    question = unit([1, 1])
    told, known, unknown = add_similarities(
        [near("a", 0.5, vector=[1, 0]), hit("b", vector=[1, 1]), hit("c")], question
    )
    assert told.similarity == 0.5
    assert known.similarity == pytest.approx(1.0)
    assert unknown.similarity is None
    assert add_similarities([hit("b", vector=[1, 1])], None)[0].similarity is None
