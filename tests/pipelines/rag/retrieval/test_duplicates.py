from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from pipelines.rag.retrieval.diversity import drop_duplicates
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
