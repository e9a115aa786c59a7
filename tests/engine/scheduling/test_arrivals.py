import pytest

from engine.scheduling.fair_share import MAX_SOURCES, PAUSE_S, ArrivalRates


def test_the_rate_of_a_tenant_is_what_came_of_late() -> None:
    arrivals = ArrivalRates()
    for number in range(400):
        arrivals.observe(0, "a", number / 20)
    rate, duration_s = arrivals.expect(0, "a", 20.0)
    assert rate == pytest.approx(20.0, rel=0.1)
    assert duration_s == 20.0, "as long as it has"
    assert arrivals.expect(0, "other", 20.0) == (0.0, 0.0)
    assert arrivals.expect(0, "a", 25.0)[0] < 10.0
    assert arrivals.expect(0, "a", 21.0 + PAUSE_S) == (0.0, 0.0)


def test_a_tenant_that_comes_back_after_a_pause_begins_anew() -> None:
    arrivals = ArrivalRates()
    arrivals.observe(0, "a", 0.0)
    arrivals.observe(0, "a", 100.0)
    assert arrivals.expect(0, "a", 102.0) == (0.5, 2.0)


def test_it_forgets_who_came_longest_ago() -> None:
    arrivals = ArrivalRates()
    for number in range(MAX_SOURCES + 1):
        arrivals.observe(0, str(number), 0.0)
    assert len(arrivals.sources()) == MAX_SOURCES and (0, "0") not in arrivals.sources()
