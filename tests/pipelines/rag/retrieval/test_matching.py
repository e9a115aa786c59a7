from dataclasses import replace

import pytest

from pipelines.rag.retrieval.matching import names, subjects
from tests.pipelines.rag.retrieval.hits import hit


def test_subjects_are_what_a_question_is_about() -> None:
    assert subjects("What does max_num_seqs do, and how is it set?") == {"max_num_seqs", "set"}
    assert subjects("What is it?") == frozenset()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("The SHIPPING time of parcels", True),
        ("Nothing but time", False),
        ("shippings", False),
    ],
)
def test_a_chunk_names_half_of_the_words(text: str, expected: bool) -> None:
    assert names(hit("d", text=text), frozenset({"shipping", "parcels", "days"})) is expected


def test_heading_and_title_count_too() -> None:
    words = frozenset({"queue", "limits"})
    assert names(replace(hit("d", text="256"), heading="Limits"), words)
    assert names(replace(hit("d", text="256"), title="Queue"), words)
    assert not names(hit("d", text="256"), words)


def test_a_question_about_nothing_is_named_by_nothing() -> None:
    assert not names(hit("d", text="anything"), frozenset())
