"""What the controller of a fleet does next."""

from sluice.cli.fleet.host import EngineStatus, HostedEngineState
from sluice.cli.fleet.plan import FleetState, choose_members, plan_fleet
from sluice.engine.fleet.membership.file import EngineEntry

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
