from hypothesis import given
from hypothesis import strategies as st

from pipelines.rag.prompts.assembly import PromptSelection, drop_last, select_contents

SIZES = st.lists(st.integers(1, 60), max_size=8)


def used(chosen: PromptSelection, passages: list[int], exchanges: list[int]) -> int:
    recent = exchanges[len(exchanges) - chosen.num_exchanges :]
    return sum(passages[index] for index in chosen.passages) + sum(recent)


@given(SIZES, SIZES, st.integers(0, 300))
def test_what_is_kept_fits(passages: list[int], exchanges: list[int], room: int) -> None:
    assert used(select_contents(passages, exchanges, room), passages, exchanges) <= room


@given(SIZES, SIZES, st.integers(0, 300))
def test_nothing_that_would_fit_is_left_out(passages: list[int], exchanges: list[int], room: int) -> None:
    chosen = select_contents(passages, exchanges, room)
    left = room - used(chosen, passages, exchanges)
    if chosen.num_exchanges < len(exchanges):
        assert exchanges[len(exchanges) - chosen.num_exchanges - 1] > left
    if not exchanges:
        assert all(passages[index] > left for index in range(len(passages)) if index not in chosen.passages)


@given(SIZES, SIZES)
def test_everything_is_kept_where_there_is_room(passages: list[int], exchanges: list[int]) -> None:
    room = 2 * (sum(passages) + sum(exchanges))
    assert select_contents(passages, exchanges, room) == PromptSelection(tuple(range(len(passages))), len(exchanges))


def test_after_a_passage_that_is_too_long_shorter_ones_are_kept() -> None:
    assert select_contents([30, 80, 20, 60, 10], [], 70).passages == (0, 2, 4)


def test_the_oldest_exchanges_go_first_and_leave_the_sources_half_of_the_room() -> None:
    assert select_contents([40], [30, 30, 20], 100) == PromptSelection((0,), 2)
    assert select_contents([60], [30, 30, 20], 100) == PromptSelection((0,), 1)
    assert select_contents([], [30, 30, 20], 100) == PromptSelection((), 3)


def test_a_fit_gets_smaller_until_nothing_is_left() -> None:
    chosen: PromptSelection | None = PromptSelection((0, 2), 1)
    seen = []
    while chosen is not None:
        seen.append(chosen)
        chosen = drop_last(chosen)
    assert seen == [
        PromptSelection((0, 2), 1),
        PromptSelection((0,), 1),
        PromptSelection((), 1),
        PromptSelection((), 0),
    ]
