"""How many engines a fleet has, and what its controller does next."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sluice.cli.fleet.host import EngineStatus, HostedEngineState
from sluice.cli.fleet.plan import (
    NO_STATE,
    FleetState,
    ScalePolicy,
    ScaleState,
    choose_members,
    decide,
    plan_fleet,
    read_pressure,
)
from sluice.engine.fleet.membership.file import EngineEntry

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


READY = EngineStatus(HostedEngineState.READY, "tcp://h:1")
STARTING = EngineStatus(HostedEngineState.STARTING, "tcp://h:2")
DRAINING = EngineStatus(HostedEngineState.DRAINING, "tcp://h:1")
ENDED = EngineStatus(HostedEngineState.ENDED, "tcp://h:1")


def test_missing_engines_are_started_under_new_names() -> None:
    plan = plan_fleet(FleetState(replicas=2), {}, "f")
    assert plan.started == ("f-0", "f-1")
    assert plan.state == FleetState(2, ("f-0", "f-1"), (), 2)
    again = plan_fleet(FleetState(3, ("f-0", "f-1"), (), 5), {"f-0": READY, "f-1": None}, "f")
    assert again.started == ("f-5",)


def test_the_youngest_leaves_and_before_it_what_is_not_ready() -> None:
    names = ("f-0", "f-1", "f-2")
    state = FleetState(2, names, (), 3)
    assert plan_fleet(state, dict.fromkeys(names, READY), "f").drained == ("f-2",)
    assert plan_fleet(state, {"f-0": READY, "f-1": STARTING, "f-2": READY}, "f").drained == ("f-1",)
    assert plan_fleet(state, {"f-0": None, "f-1": READY, "f-2": READY}, "f").drained == ("f-0",)


def test_what_leaves_is_no_member_at_once_and_is_removed_once_it_has_ended() -> None:
    state = FleetState(1, ("f-0", "f-1"), (), 2)
    statuses: dict[str, EngineStatus | None] = {"f-0": READY, "f-1": READY}
    plan = plan_fleet(state, statuses, "f")
    assert [*choose_members({}, plan.state, statuses)] == ["f-0"]
    waiting = plan_fleet(plan.state, {"f-0": READY, "f-1": DRAINING}, "f")
    assert (waiting.drained, waiting.removed, waiting.started) == (("f-1",), (), ())
    gone = plan_fleet(waiting.state, {"f-0": READY, "f-1": ENDED}, "f")
    assert gone.removed == ("f-1",)
    assert gone.state == FleetState(1, ("f-0",), (), 2)


def test_an_engine_that_leaves_is_replaced_where_more_are_wanted_again() -> None:
    state = FleetState(2, ("f-0", "f-1"), ("f-1",), 2)
    assert plan_fleet(state, {"f-0": READY, "f-1": DRAINING}, "f").started == ("f-2",)


def test_who_cannot_be_asked_stays_what_it_was() -> None:
    state = FleetState(3, ("f-0", "f-1", "f-2"), (), 3)
    known = {"f-0": EngineEntry("f-0", "tcp://h:9"), "f-1": EngineEntry("f-1", "tcp://h:8")}
    members = choose_members(known, state, {"f-0": None, "f-1": STARTING, "f-2": None})
    assert members == {"f-0": known["f-0"]}, "one that starts anew has another address"
