from dataclasses import dataclass

from engine.config import SchedulerPolicy
from engine.delegated.admission import RuntimeCapacity, choose_admitted, num_started
from engine.scheduling.policies import find_policy


@dataclass(frozen=True)
class Holder:
    worst_case_blocks: int
    num_allocated_blocks: int = 1


def capacity(
    places: int, blocks: int, policy: SchedulerPolicy = SchedulerPolicy.GUARANTEED_NO_EVICT
) -> RuntimeCapacity:
    return RuntimeCapacity(places, blocks, find_policy(policy))


def test_those_that_fit_are_admitted_and_a_few_more() -> None:
    waiting = [Holder(2) for _ in range(40)]
    assert len(choose_admitted(waiting, [], capacity(16, 1000))) == 16 + 1
    assert len(choose_admitted(waiting, [], capacity(64, 1000))) == 40
    assert len(choose_admitted(waiting, [], capacity(64, 20))) == 10 + 4


def test_a_misfit_is_looked_ahead_to_and_nobody_passes_it() -> None:
    waiting = [Holder(2), Holder(9), Holder(1), Holder(1)]
    assert choose_admitted(waiting, [], capacity(8, 10)) == waiting[:2]
    assert choose_admitted(waiting[2:], waiting[:2], capacity(8, 10)) == []


def test_places_that_come_free_are_filled() -> None:
    in_flight = [Holder(1) for _ in range(16)]
    assert len(choose_admitted([Holder(1)] * 5, in_flight, capacity(16, 100))) == 1
    assert len(choose_admitted([Holder(1)] * 5, in_flight[:10], capacity(16, 100))) == 5
    assert num_started([*in_flight, Holder(1)], capacity(16, 100)) == 16


def test_a_static_batch_begins_when_the_last_one_has_ended() -> None:
    static = capacity(4, 100, SchedulerPolicy.STATIC_BATCH)
    waiting = [Holder(2) for _ in range(9)]
    assert len(choose_admitted(waiting, [], static)) == 4
    assert choose_admitted(waiting, [Holder(2)], static) == []


def test_max_utilization_counts_what_is_held() -> None:
    greedy = capacity(16, 10, SchedulerPolicy.MAX_UTILIZATION)
    assert len(choose_admitted([Holder(10) for _ in range(9)], [], greedy)) == 5 + 1


def test_a_runtime_that_does_not_reserve_gets_only_what_fits() -> None:
    waiting = [Holder(2) for _ in range(40)]
    for places, blocks, admitted in ((16, 1000, 16), (64, 20, 10), (64, 21, 10)):
        strict = RuntimeCapacity(places, blocks, find_policy(SchedulerPolicy.GUARANTEED_NO_EVICT), reserves=False)
        chosen = choose_admitted(waiting, [], strict)
        assert len(chosen) == admitted
        assert choose_admitted(waiting, chosen, strict) == []
        assert len(choose_admitted(waiting, chosen[1:], strict)) == 1
