"""Where the sessions of a fleet go: by what is remembered of them, and without that equally at each gateway."""

from sluice.engine.fleet.choosing import SessionPlaces
from sluice.engine.fleet.client import FleetClient
from tests.clock import ManualClock
from tests.engine.fleet.simulated import Simulation
from tests.engine.fleet.test_choosing import home_of
from tests.engine.parts import make_request

NAMES = ["a", "b", "c"]


def make_places(max_sessions: int = 3) -> tuple[SessionPlaces, ManualClock[float]]:
    clock = ManualClock(0.0)
    return SessionPlaces(10.0, max_sessions, clock), clock


def other_than(name: str) -> str:
    return next(each for each in NAMES if each != name)


def test_a_session_is_where_its_last_request_went() -> None:
    places, _ = make_places()
    usual = places.find("s", NAMES)
    places.note("s", other_than(usual))
    assert places.find("s", NAMES) == other_than(usual)
    assert places.find("s", [usual]) == usual, "its replica is not among them"


def test_gateways_agree_on_an_unknown_session_and_spread_sessions() -> None:
    sessions = [f"session {number}" for number in range(300)]
    first, second = ([make_places()[0].find(each, names) for each in sessions] for names in (NAMES, NAMES[::-1]))
    assert first == second
    assert all(first.count(name) > 50 for name in NAMES)
    fewer = [make_places()[0].find(each, NAMES[:2]) for each in sessions]
    assert [a for a, b in zip(first, fewer, strict=True) if a != b] == ["c"] * first.count("c"), "the others stay"
    assert make_places()[0].find("s", []) == ""


def test_sessions_are_forgotten_after_their_time_and_beyond_their_number() -> None:
    places, clock = make_places()
    elsewhere = {each: other_than(places.find(each, NAMES)) for each in "pqrst"}
    for session in "pqrp":
        places.note(session, elsewhere[session])
    places.note("s", elsewhere["s"])
    assert [places.find(each, NAMES) == elsewhere[each] for each in "pqrs"] == [True, False, True, True]
    clock.now = 10.5
    assert places.find("p", NAMES) != elsewhere["p"]
    places.note("t", elsewhere["t"])
    assert len(places) == 1


def submit_turn(fleet: FleetClient, request_id: str, session: str) -> str:
    fleet.submit(make_request([1, 2, 3], request_id, max_tokens=1, session=session))
    return home_of(fleet, request_id)


def test_the_turns_of_a_session_go_to_one_replica_until_it_leaves() -> None:
    simulation = Simulation(2, 3)
    homes = []
    for turn in range(6):  # through both gateways in turn
        homes.append(submit_turn(simulation.gateways[turn % 2], f"turn {turn}", "s"))
        simulation.settle()
    assert len(set(homes)) == 1
    [lost] = (each for each in simulation.gateways[0].replicas if each.name == homes[0])
    lost.is_draining = True
    moved = submit_turn(simulation.gateways[0], "without it", "s")
    assert moved != homes[0]
    assert [simulation.gateways[0].session_replica(each) for each in ("s", "unknown")] == [moved, ""]
    simulation.settle()
    lost.is_draining = False
    assert submit_turn(simulation.gateways[0], "back", "s") == moved
    simulation.settle()


def test_requests_without_a_session_take_turns() -> None:
    simulation = Simulation(1, 3)
    [fleet] = simulation.gateways
    homes = set()
    for turn in range(6):
        homes.add(submit_turn(fleet, f"turn {turn}", ""))
        simulation.settle()
    assert len(homes) == 3
