import math

import pytest

from sluice.engine.forecast.schedule import ForecastSequence, Limits, RunningEnd, SimulatedGroup, simulate


def waiting(
    output: float, *, blocks: float = 1.0, prompt: float = 0.0, at: float = 0.0, until: float = math.inf
) -> ForecastSequence:
    return ForecastSequence(at, prompt, output, blocks, until)


def group(*sequences: ForecastSequence, priority: float = 0, weight: float = 1.0) -> SimulatedGroup:
    return SimulatedGroup(priority, weight, 0.0, waiting=list(sequences))


def limits(places: int, blocks: float = 1e9, *, is_in_flight: bool = True) -> Limits:
    return Limits(places, blocks, 100.0, 1.0, is_in_flight)


def starts(running: list[RunningEnd], groups: list[SimulatedGroup], free: Limits) -> list[float]:
    return [start.at for start in simulate(running, groups, free)[0]]


def test_a_freed_place_is_taken_by_the_next() -> None:
    assert starts([RunningEnd(5.0, 1.0, -1)], [group(*[waiting(10.0)] * 4)], limits(1)) == [0.0, 5.0, 10.0, 15.0]


def test_blocks_are_waited_for_in_order() -> None:
    queue = group(waiting(10.0, blocks=4.0), waiting(1.0, blocks=1.0))
    assert starts([RunningEnd(5.0, 2.0, -1), RunningEnd(9.0, 2.0, -1)], [queue], limits(9, 0.5)) == [9.0, 19.0]


def test_prompts_share_the_steps() -> None:
    queue = group(waiting(10.0, prompt=200.0), waiting(10.0, prompt=300.0), waiting(1.0), waiting(1.0))
    assert starts([], [queue], limits(2)) == [0.0, 0.0, 12.0, 13.0]


def test_a_static_batch_ends_as_a_whole() -> None:
    queue = group(waiting(10.0), waiting(30.0), waiting(5.0))
    assert starts([RunningEnd(7.0, 1.0, -1)], [queue], limits(1, is_in_flight=False)) == [7.0, 7.0, 37.0]


def test_who_gives_up_takes_no_place() -> None:
    queue = group(waiting(10.0), waiting(50.0, until=5.0), waiting(1.0))
    assert starts([], [queue], limits(1)) == [0.0, 10.0, 10.0]


def test_higher_priorities_go_first_and_those_that_come_later_too() -> None:
    low = group(waiting(10.0), priority=1)
    high = group(waiting(10.0), waiting(10.0, at=8.0), waiting(10.0, at=50.0))
    assert starts([RunningEnd(5.0, 1.0, -1)], [low, high], limits(0)) == [25.0]


@pytest.mark.parametrize(("weight", "num_others"), [(1.0, 5), (3.0, 15)])
def test_tenants_share_by_what_they_were_served(weight: float, num_others: int) -> None:
    own, other = group(*[waiting(10.0)] * 5), group(*[waiting(10.0)] * 40, weight=weight)
    begun = starts([], [own, other], limits(1))
    assert other.num_gone == pytest.approx(num_others, abs=weight + 1)
    assert begun[-1] == pytest.approx(10.0 * (other.num_gone + 4))
