import pytest

from sluice.engine.scheduling.arrivals import MAX_PAUSE_S, MAX_SOURCES, ArrivalRates


def steady(arrivals: ArrivalRates, count: int, per_s: float, from_s: float = 0.0) -> None:
    for number in range(count):
        arrivals.observe(0, "a", from_s + number / per_s)


def test_the_rate_of_a_tenant_is_what_came_of_late() -> None:
    arrivals = ArrivalRates()
    steady(arrivals, 400, 20.0)
    rate, duration_s = arrivals.expect(0, "a", 20.0)
    assert rate == pytest.approx(20.0, rel=0.1)
    assert duration_s == pytest.approx(20.0), "as long as it has"
    assert arrivals.expect(0, "other", 20.0) == (0.0, 0.0)
    assert arrivals.expect(0, "a", 25.0)[0] < 15.0
    assert arrivals.expect(0, "a", 21.0 + MAX_PAUSE_S) == (0.0, 0.0)


def test_the_rate_is_known_soon_after_a_tenant_has_begun_again() -> None:
    """Averaged over the pause before, it would be 4 in a second."""
    arrivals = ArrivalRates()
    arrivals.observe(0, "a", 0.0)
    steady(arrivals, 20, 80.0, from_s=MAX_PAUSE_S / 2)
    assert arrivals.expect(0, "a", MAX_PAUSE_S / 2 + 0.25)[0] > 15.0


def test_a_crowd_is_not_expected_to_go_on_once_it_has_paused() -> None:
    arrivals = ArrivalRates()
    steady(arrivals, 100, 1000.0)
    assert arrivals.expect(0, "a", 0.1)[0] > 500.0
    assert arrivals.expect(0, "a", 0.3)[0] < 110.0, "as many as in all, not as of late"
    steady(arrivals, 100, 1000.0, from_s=1.0)
    assert arrivals.expect(0, "a", 1.1)[0] > 500.0


def test_a_tenant_that_comes_back_after_a_long_pause_begins_anew() -> None:
    arrivals = ArrivalRates()
    steady(arrivals, 50, 50.0)
    arrivals.observe(0, "a", 100.0)
    rate, duration_s = arrivals.expect(0, "a", 102.0)
    assert rate < 1.0 and duration_s == 2.0


def test_it_forgets_who_came_longest_ago() -> None:
    arrivals = ArrivalRates()
    for number in range(MAX_SOURCES + 1):
        arrivals.observe(0, str(number), 0.0)
    assert len(arrivals.sources()) == MAX_SOURCES and (0, "0") not in arrivals.sources()
