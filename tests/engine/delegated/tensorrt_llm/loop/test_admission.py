from dataclasses import dataclass

import pytest

from engine.config import SchedulerPolicy
from engine.delegated.tensorrt_llm.loop.admission import Capacity, num_started, to_hand_over
from engine.delegated.tensorrt_llm.loop.sequence import blocks_to_completion


@dataclass(frozen=True)
class Held:
    worst_case_blocks: int
    num_allocated_blocks: int = 1


def capacity(places: int, blocks: int, policy: SchedulerPolicy = SchedulerPolicy.GUARANTEED_NO_EVICT) -> Capacity:
    return Capacity(places, blocks, policy)


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "beams", "blocks"),
    [
        (1, 1, 1, 1),
        (31, 1, 1, 1),
        (32, 1, 1, 2),  # the last token counts, though it is never fed back
        (32, 32, 1, 2),
        (33, 32, 1, 3),
        (70, 30, 1, 4),
        (70, 30, 3, 2 + 2 * 3),  # whole blocks of the prompt are shared
        (64, 32, 4, 2 + 4),
        (5, 20, 4, 4),
    ],
)
def test_the_reservation_is_the_references(prompt: int, max_tokens: int, beams: int, blocks: int) -> None:
    assert blocks_to_completion(prompt, max_tokens, beams, 32) == blocks


def test_who_fits_goes_in_and_a_few_more() -> None:
    waiting = [Held(2) for _ in range(40)]
    assert len(to_hand_over(waiting, [], capacity(16, 1000))) == 16 + 1
    assert len(to_hand_over(waiting, [], capacity(64, 1000))) == 40
    assert len(to_hand_over(waiting, [], capacity(64, 20))) == 10 + 4


def test_a_misfit_is_looked_ahead_to_and_nobody_passes_it() -> None:
    waiting = [Held(2), Held(9), Held(1), Held(1)]
    assert to_hand_over(waiting, [], capacity(8, 10)) == waiting[:2]
    assert to_hand_over(waiting[2:], waiting[:2], capacity(8, 10)) == []


def test_places_that_come_free_are_filled() -> None:
    inside = [Held(1) for _ in range(16)]
    assert len(to_hand_over([Held(1)] * 5, inside, capacity(16, 100))) == 1
    assert len(to_hand_over([Held(1)] * 5, inside[:10], capacity(16, 100))) == 5
    assert num_started([*inside, Held(1)], capacity(16, 100)) == 16


def test_a_static_batch_begins_when_the_last_one_has_ended() -> None:
    static = capacity(4, 100, SchedulerPolicy.STATIC_BATCH)
    waiting = [Held(2) for _ in range(9)]
    assert len(to_hand_over(waiting, [], static)) == 4
    assert to_hand_over(waiting, [Held(2)], static) == []


def test_max_utilization_counts_what_is_held() -> None:
    greedy = capacity(16, 10, SchedulerPolicy.MAX_UTILIZATION)
    assert len(to_hand_over([Held(10) for _ in range(9)], [], greedy)) == 5 + 1
