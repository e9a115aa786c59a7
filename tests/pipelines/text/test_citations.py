import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice.pipelines.text.citations import Source, cite

LIMITS = "Sluice admits a request only when its worst case fits into the free blocks. Others wait in a queue."
SHIPPING = "Shipping takes five business days. Refunds are accepted within 30 days of purchase."


def source(number: int, text: str) -> Source:
    return Source(id=number, document=f"d{number}", start=0, end=len(text), score=1.0, text=text)


SOURCES = [source(1, LIMITS), source(2, SHIPPING)]


def cited(answer: str, sources: list[Source] = SOURCES) -> list[tuple[int, str]]:
    """Source and the words that rest on it."""
    return [(each.source, answer[each.start : each.end]) for each in cite(answer, sources)]


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ("It takes five days [2].", [(2, "It takes five days")]),
        ("It takes five days. [2]", [(2, "It takes five days.")]),
        ("It takes five days[2].", [(2, "It takes five days")]),
        ("Both say so [1, 2].", [(1, "Both say so"), (2, "Both say so")]),
        ("Both say so [1][2].", [(1, "Both say so"), (2, "Both say so")]),
        ("Both say so [1] [2]!", [(1, "Both say so"), (2, "Both say so")]),
        ("So it is 【2】.", [(2, "So it is")]),
        ("So it is 【2†docs】.", [(2, "So it is")]),
        ("First this [1]. Then that [2].", [(1, "First this"), (2, "Then that")]),
        ("First this [1] and then that [2].", [(1, "First this"), (2, "and then that")]),
        ("Nobody says so. It fits [1].", [(1, "It fits")]),
        ("- It fits [1]\n- It ships [2]", [(1, "- It fits"), (2, "- It ships")]),
        ("Twice the same [1][1].", [(1, "Twice the same")]),
    ],
)
def test_markers_mark_the_sentence_before_them(answer: str, expected: list[tuple[int, str]]) -> None:
    assert cited(answer) == expected
    assert {each.by for each in cite(answer, SOURCES)} == {"marker"}


@pytest.mark.parametrize(
    "answer",
    [
        "Nobody knows [7].",
        "[1]",
        "Take `rows[1]` of it.",
        "```\nrows = a[1]\n```",
        "See [1](https://example.com).",
        "An empty [] bracket, a word [a] and [1-2].",
    ],
)
def test_what_is_no_marker_of_a_source_cites_nothing(answer: str) -> None:
    assert cited(answer) == []


def test_a_known_number_beside_an_unknown_one_counts() -> None:
    assert cited("So it is [9, 2].") == [(2, "So it is")]


def test_a_quoted_sentence_cites_its_source() -> None:
    answer = "Shipping takes five business days."
    assert cite(answer, SOURCES)[0].by == "overlap"
    assert cited(answer) == [(2, answer)]


def test_each_sentence_has_its_own_source() -> None:
    answer = "Shipping takes five business days. A request only when its worst case fits into the free blocks."
    assert cited(answer) == [
        (2, "Shipping takes five business days."),
        (1, "A request only when its worst case fits into the free blocks."),
    ]


def test_a_sentence_of_other_words_cites_nothing() -> None:
    assert cited("The capital of France is Paris, which lies on the Seine.") == []
    # Words in common, but in no order of the source's.
    assert cited("The blocks of a queue wait until others admit a free request, whose case is the worst.") == []


def test_few_words_in_a_row_do_not_make_a_quote() -> None:
    assert cited("Please note that within 30 days everything may be quite different for you and me.") == []


def test_case_and_punctuation_do_not_matter() -> None:
    assert cited('"shipping takes FIVE business-days"') == [(2, '"shipping takes FIVE business-days"')]


def test_the_first_of_two_equal_sources_is_cited() -> None:
    assert cited("Shipping takes five business days.", [source(1, SHIPPING), source(2, SHIPPING)])[0][0] == 1


@pytest.mark.parametrize(
    "answer",
    [
        "The context does not answer this question.",
        "The sources do not answer this question.",
        "Unfortunately, the provided documents don't mention shipping [2].",
        "",
    ],
)
def test_an_answer_that_finds_nothing_cites_nothing(answer: str) -> None:
    sources = [*SOURCES, source(3, "It then says: The context does not answer this question.")]
    assert cited(answer, sources) == []


def test_no_sources_no_citations() -> None:
    assert cited("Shipping takes five business days [1].", []) == []


PIECES = st.sampled_from(
    [
        LIMITS,
        "Shipping takes five business days.",
        "[1]",
        "[2, 3]",
        "【2】",
        " ",
        "\n",
        ".",
        "`",
        "```",
        "é",
        "𝄞",
        "word ",
    ]
)


@given(st.lists(PIECES, max_size=12).map("".join))
def test_ranges_lie_in_the_answer_and_sources_exist(answer: str) -> None:
    for each in cite(answer, SOURCES):
        assert 0 <= each.start < each.end <= len(answer)
        assert answer[each.start : each.end].strip() == answer[each.start : each.end]
        assert each.source in (1, 2)


@given(st.text(max_size=200))
def test_any_text_is_an_answer(answer: str) -> None:
    found = cite(answer, SOURCES)
    assert all(answer[each.start : each.end] for each in found)
    assert len(set(found)) == len(found)


@pytest.mark.parametrize(
    "answer", ["." * 400_000 + "x", "[1†" * 130_000, "a [1]`b` " * 20_000, "One two three four five. " * 16_000]
)
def test_any_answer_takes_linear_time(answer: str) -> None:
    """It is read on the event loop, and a model may say anything. What is quadratic takes many minutes for these."""
    many = [source(number, " ".join(f"w{number}x{word}" for word in range(150))) for number in range(100)]
    assert len({each.end for each in cite(answer, many)}) == (20_000 if "`" in answer else 0)
