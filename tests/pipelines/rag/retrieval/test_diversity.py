from dataclasses import replace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from sluice.pipelines.rag.retrieval.diversity import diversify, drop_duplicates
from sluice.pipelines.rag.types import Hit
from tests.pipelines.rag.retrieval.hits import hit, names

TEXT = "A request that can never fit is refused at once, and the client hears of both of its sizes."


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
