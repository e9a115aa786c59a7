"""Which waiting requests a delegated runtime gets."""

from dataclasses import dataclass, field

from sluice.engine.blocks import BlockHash
from sluice.engine.config import SchedulerPolicy
from sluice.engine.delegated.admission import BlockSharing, RuntimeCapacity, RuntimeGate
from sluice.engine.scheduling.planner import find_policy


@dataclass(eq=False)
class Holder:
    worst_case_blocks: int
    num_allocated_blocks: int = 1
    prompt_hashes: list[BlockHash] = field(default_factory=list)


def gate(
    places: int,
    blocks: int,
    policy: SchedulerPolicy = SchedulerPolicy.GUARANTEED_NO_EVICT,
    *,
    takes_early: bool = True,
    sharing: BlockSharing = BlockSharing.NONE,
) -> RuntimeGate[Holder]:
    return RuntimeGate(RuntimeCapacity(places, blocks, find_policy(policy), takes_early=takes_early, sharing=sharing))


def holders(count: int, blocks: int = 2) -> list[Holder]:
    return [Holder(blocks) for _ in range(count)]


def test_those_that_fit_are_admitted_and_a_few_more() -> None:
    assert len(gate(16, 1000).choose(holders(40), [])) == 16 + 1
    assert len(gate(64, 1000).choose(holders(40), [])) == 40
    assert len(gate(64, 20).choose(holders(40), [])) == 10 + 4


def test_a_misfit_is_looked_ahead_to_and_nobody_passes_it() -> None:
    waiting = [Holder(2), Holder(9), Holder(1), Holder(1)]
    narrow = gate(8, 10)
    assert narrow.choose(waiting, []) == waiting[:2]
    assert narrow.choose(waiting[2:], waiting[:2]) == []


def test_places_that_come_free_are_filled() -> None:
    in_flight = holders(16, 1)
    assert len(gate(16, 100).choose(holders(5, 1), in_flight)) == 1
    assert len(gate(16, 100).choose(holders(5, 1), in_flight[:10])) == 5
    assert gate(16, 100).num_started([*in_flight, Holder(1)]) == 16


def test_a_static_batch_begins_when_the_last_one_has_ended() -> None:
    static = gate(4, 100, SchedulerPolicy.STATIC_BATCH)
    waiting = holders(9)
    assert len(static.choose(waiting, [])) == 4
    assert static.choose(waiting, [Holder(2)]) == []


def test_max_utilization_counts_what_is_held() -> None:
    assert len(gate(16, 10, SchedulerPolicy.MAX_UTILIZATION).choose(holders(9, 10), [])) == 5 + 1


def test_a_runtime_that_takes_none_early_gets_only_what_fits() -> None:
    for places, blocks, admitted in ((16, 1000, 16), (64, 20, 10), (64, 21, 10)):
        waiting = holders(40)
        strict = gate(places, blocks, takes_early=False)
        chosen = strict.choose(waiting, [])
        assert len(chosen) == admitted
        assert strict.choose(waiting[admitted:], chosen) == []
        strict.shared.remove(chosen[0])
        assert len(strict.choose(waiting[admitted:], chosen[1:])) == 1


def alike(count: int) -> list[Holder]:
    """Return requests of 8 blocks whose first 6 are the same."""
    prefix = [BlockHash(bytes([number])) for number in range(6)]
    return [Holder(8, prompt_hashes=[*prefix, BlockHash(b"own" + bytes([number]))]) for number in range(count)]


def test_a_prefix_of_all_in_flight_counts_once() -> None:
    fitting = gate(64, 20, takes_early=False, sharing=BlockSharing.AWAITED)
    chosen = fitting.choose(alike(40), [])
    assert len(chosen) == 1 + (20 - 8) // 2
    assert fitting.reserved_blocks(chosen) == 20
    assert len(gate(64, 20, takes_early=False).choose(alike(40), [])) == 2


def test_one_that_ends_leaves_the_prefix_to_the_next() -> None:
    fitting = gate(64, 20, takes_early=False, sharing=BlockSharing.AWAITED)
    waiting = alike(40)
    in_flight = fitting.choose(waiting, [])
    for number in range(5):
        fitting.shared.remove(in_flight.pop(0))
        assert fitting.reserved_blocks(in_flight) == 18
        in_flight += fitting.choose(waiting[7 + number :], in_flight)
        assert fitting.reserved_blocks(in_flight) == 20


def test_where_candidates_are_reckoned_in_full_a_prefix_counts_once_as_they_begin() -> None:
    """So does TensorRT-LLM 1.2: it has 20 blocks, and each needs 8 of them to begin."""
    full = gate(64, 20, takes_early=False, sharing=BlockSharing.RUNNING)
    waiting = alike(40)
    in_flight = full.choose(waiting, [])
    assert len(in_flight) == 2
    for holder in in_flight:
        full.shared.begin(holder)
    assert full.reserved_blocks(in_flight) == 8 + 2
    in_flight += full.choose(waiting[2:], in_flight)
    assert len(in_flight) == 3


def test_only_what_is_computed_is_shared_where_two_would_compute_it_twice() -> None:
    computed = gate(64, 24, takes_early=False, sharing=BlockSharing.COMPUTED)
    waiting = alike(40)
    in_flight = computed.choose(waiting, [])
    assert len(in_flight) == 3
    for holder in in_flight:
        computed.shared.begin(holder)
    assert computed.reserved_blocks(in_flight) == 24, "each has computed its own"
    computed.shared.remove(in_flight.pop())
    in_flight += computed.choose(waiting[3:], in_flight)
    assert len(in_flight) == 2 + 4, "2 blocks each beside the prefix of the first"
