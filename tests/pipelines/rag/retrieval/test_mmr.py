from dataclasses import replace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from pipelines.rag.retrieval.diversity import diversify
from pipelines.rag.types import Hit
from tests.pipelines.rag.retrieval.hits import hit, names

TRADE_OFFS = st.floats(0, 1)


@st.composite
def rankings(draw: st.DrawFn) -> list[Hit]:
    """Best first, with vectors of a few directions, so that some repeat others."""
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


def test_a_chunk_without_a_vector_is_like_no_other() -> None:
    hits = [hit("a", 1.0, vector=[1, 0]), hit("again", 0.9, vector=[1, 0]), hit("unknown", 0.5)]
    assert names(diversify(hits, 2, 0.5)) == ["a", "unknown"]
