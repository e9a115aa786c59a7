from hypothesis import given
from hypothesis import strategies as st

from pipelines.rag.prompts.budget import Fit, fit, smaller

SIZES = st.lists(st.integers(1, 60), max_size=8)


def used(chosen: Fit, passages: list[int], exchanges: list[int]) -> int:
    recent = exchanges[len(exchanges) - chosen.num_exchanges :]
    return sum(passages[index] for index in chosen.passages) + sum(recent)


@given(SIZES, SIZES, st.integers(0, 300))
def test_what_is_kept_fits(passages: list[int], exchanges: list[int], room: int) -> None:
    assert used(fit(passages, exchanges, room), passages, exchanges) <= room


@given(SIZES, SIZES, st.integers(0, 300))
def test_nothing_that_would_fit_is_left_out(passages: list[int], exchanges: list[int], room: int) -> None:
    chosen = fit(passages, exchanges, room)
    left = room - used(chosen, passages, exchanges)
    if chosen.num_exchanges < len(exchanges):
        assert exchanges[len(exchanges) - chosen.num_exchanges - 1] > left
    if not exchanges:
        assert all(passages[index] > left for index in range(len(passages)) if index not in chosen.passages)


@given(SIZES, SIZES)
def test_everything_is_kept_where_there_is_room(passages: list[int], exchanges: list[int]) -> None:
    room = 2 * (sum(passages) + sum(exchanges))
    assert fit(passages, exchanges, room) == Fit(tuple(range(len(passages))), len(exchanges))


def test_after_a_passage_that_is_too_long_shorter_ones_are_kept() -> None:
    assert fit([30, 80, 20, 60, 10], [], 70).passages == (0, 2, 4)


def test_the_oldest_exchanges_go_first_and_leave_the_sources_half_of_the_room() -> None:
    assert fit([40], [30, 30, 20], 100) == Fit((0,), 2)
    assert fit([60], [30, 30, 20], 100) == Fit((0,), 1)
    assert fit([], [30, 30, 20], 100) == Fit((), 3)


def test_a_fit_gets_smaller_until_nothing_is_left() -> None:
    chosen: Fit | None = Fit((0, 2), 1)
    seen = []
    while chosen is not None:
        seen.append(chosen)
        chosen = smaller(chosen)
    assert seen == [Fit((0, 2), 1), Fit((0,), 1), Fit((), 1), Fit((), 0)]
