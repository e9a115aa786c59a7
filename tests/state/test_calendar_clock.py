"""The clock of the calendar: jumps of the machine's clock count once they have lasted."""

import pytest

from sluice.state.calendar_clock import LASTING_S, CalendarClock

DAY_S = 86_400.0


class Clocks:
    """A machine's clock, which can be set, and one that cannot."""

    def __init__(self) -> None:
        self.passed_s = 0.0
        self.set_by_s = 1_000_000.0
        self.calendar = CalendarClock(lambda: self.passed_s + self.set_by_s, lambda: self.passed_s)

    def after(self, seconds: float) -> float:
        self.passed_s += seconds
        return self.calendar() - 1_000_000.0


@pytest.mark.parametrize("jump_s", [3 * DAY_S, -3 * DAY_S, 120.0])
def test_a_jump_that_is_undone_is_never_seen(jump_s: float) -> None:
    clocks = Clocks()
    assert clocks.after(5.0) == 5.0
    clocks.set_by_s += jump_s
    assert [clocks.after(5.0), clocks.after(LASTING_S - 10)] == [10.0, LASTING_S]
    clocks.set_by_s -= jump_s
    assert clocks.after(5.0) == LASTING_S + 5
    clocks.set_by_s += jump_s
    assert clocks.after(LASTING_S) == 2 * LASTING_S + 5, "the second jump lasts from its own beginning"


@pytest.mark.parametrize("jump_s", [3 * DAY_S, -3 * DAY_S])
def test_a_jump_that_lasts_is_believed(jump_s: float) -> None:
    clocks = Clocks()
    clocks.set_by_s += jump_s
    assert clocks.after(1.0) == 1.0
    assert clocks.after(LASTING_S) == 1.0 + LASTING_S + jump_s
    assert clocks.after(1.0) == 2.0 + LASTING_S + jump_s


def test_small_corrections_are_believed_at_once() -> None:
    clocks = Clocks()
    for number in range(1, 5):
        clocks.set_by_s += 1.5
        assert clocks.after(10.0) == number * 11.5
