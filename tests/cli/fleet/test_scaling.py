"""How many engines a fleet has."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sluice.cli.fleet.scaling import NO_STATE, ScalePolicy, ScaleState, decide, read_pressure

POLICY = ScalePolicy(min_replicas=1, max_replicas=8)


def after(pressure: float, seconds: float, replicas: int, policy: ScalePolicy = POLICY) -> int:
    """The size once the pressure has been the same for `seconds`, looked at each second."""
    state, now_s, size = NO_STATE, 0.0, replicas
    while now_s <= seconds and size == replicas:
        size, state = decide(policy, state, replicas, pressure, now_s)
        now_s += 1
    return size


def test_it_grows_to_what_the_pressure_asks_for() -> None:
    assert after(1.5, 14, 4) == 4
    assert after(1.5, 15, 4) == 6
    assert after(1.2, 15, 4) == 5
    assert after(9.0, 15, 2) == 4, "at most to twice its size"
    assert after(9.0, 15, 8) == 8, "the most"


def test_it_shrinks_by_one_and_late() -> None:
    assert after(0.2, 299, 4) == 4
    assert after(0.2, 300, 4) == 3
    assert after(0.0, 1000, 1) == 1, "the least"


def test_it_keeps_its_size_near_the_target() -> None:
    for pressure in (0.7, 1.0, 1.1):
        assert after(pressure, 1000, 4) == 4


def test_it_does_not_shrink_into_a_load_that_would_make_it_grow() -> None:
    assert after(0.55, 1000, 2) == 2, "one alone would have a pressure of 1.1"


def test_one_quiet_moment_begins_the_wait_anew() -> None:
    size, state = decide(POLICY, NO_STATE, 2, 2.0, 0.0)
    assert (size, state) == (2, ScaleState(high_since_s=0.0))
    size, state = decide(POLICY, state, 2, 1.0, 10.0)
    assert (size, state) == (2, NO_STATE)
    assert decide(POLICY, state, 2, 2.0, 20.0) == (2, ScaleState(high_since_s=20.0))


@pytest.mark.parametrize("unknown", [None, math.nan, math.inf])
def test_an_unknown_pressure_changes_nothing(unknown: float | None) -> None:
    assert decide(POLICY, ScaleState(high_since_s=0.0), 3, unknown, 100.0) == (3, NO_STATE)


def test_bounds_hold_at_once() -> None:
    policy = ScalePolicy(min_replicas=2, max_replicas=4)
    assert decide(policy, NO_STATE, 1, None, 0.0)[0] == 2
    assert decide(policy, NO_STATE, 9, 5.0, 0.0)[0] == 4


def test_the_last_engine_ends_without_any_pressure_and_the_first_starts_at_once() -> None:
    policy = ScalePolicy(min_replicas=0, max_replicas=4)
    assert after(0.0, 299, 1, policy) == 1
    assert after(0.0, 300, 1, policy) == 0
    assert after(0.01, 1000, 1, policy) == 1, "it has had requests"
    assert after(2.0, 0, 0, policy) == 1
    assert after(0.0, 1000, 0, policy) == 0


@settings(max_examples=40)
@given(
    pressures=st.lists(st.one_of(st.none(), st.floats(0, 50)), max_size=60),
    replicas=st.integers(0, 20),
    bounds=st.tuples(st.integers(0, 6), st.integers(6, 12)),
    gap_s=st.floats(0.1, 400),
)
def test_it_never_leaves_its_bounds(
    pressures: list[float | None], replicas: int, bounds: tuple[int, int], gap_s: float
) -> None:
    policy, state = ScalePolicy(*bounds), NO_STATE
    for number, pressure in enumerate(pressures):
        before = replicas
        replicas, state = decide(policy, state, replicas, pressure, number * gap_s)
        assert bounds[0] <= replicas <= bounds[1]
        if bounds[0] <= before <= bounds[1]:
            assert before - 1 <= replicas <= max(2 * before, 1)


PAGE = """\
# HELP sluice_scale_pressure How near the load is to its target.
# TYPE sluice_scale_pressure gauge
sluice_scale_pressure{model="a"} 0.5
sluice_scale_pressure{model="b",version="1"} 1.25
sluice_scale_pressure_other 9
sluice_requests_total 7
"""


def test_the_highest_pressure_of_a_page_counts() -> None:
    assert read_pressure(PAGE) == 1.25
    assert read_pressure("sluice_scale_pressure 2\n") == 2.0
    assert read_pressure("sluice_requests_total 7\nsluice_scale_pressure{} what\n") is None
