from dataclasses import replace

import pytest

from sluice.pipelines.rag.retrieval.search import mentions_subject, subject_words
from tests.pipelines.rag.retrieval.hits import hit


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
