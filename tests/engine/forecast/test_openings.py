from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.forecast.wait import FreedCapacity


def places(free: float, *ends: float) -> FreedCapacity:
    return FreedCapacity(free, np.array(ends), np.ones(len(ends)))


def test_what_is_free_is_had_at_once_and_the_rest_as_it_ends() -> None:
    openings = places(1, 10, 20, 30)
    assert [openings.steps_to(amount, 100, 0.0) for amount in (1, 2, 3, 4)] == [0, 10, 20, 30]


def test_alike_lives_give_back_what_they_took_a_life_later() -> None:
    openings = places(0, 10, 20)
    assert [openings.steps_to(amount, 100, 0.0) for amount in (3, 4, 5)] == [110, 120, 210]


def test_random_lives_give_back_some_of_it_at_any_time() -> None:
    openings = places(0, 10, 20)
    # 2 are held from step 20 on, each for 100 steps in the mean: one more every 50 steps.
    assert openings.steps_to(12, 100, 1.0) - openings.steps_to(11, 100, 1.0) == pytest.approx(50)
    assert openings.steps_to(2, 100, 1.0) <= 20
    # Places of lives that are somewhat alike come in between.
    assert openings.steps_to(11, 100, 0.5) == pytest.approx(
        (openings.steps_to(11, 100, 0.0) + openings.steps_to(11, 100, 1.0)) / 2
    )


def test_with_nobody_running_what_is_free_turns_over() -> None:
    openings = places(4)
    assert openings.steps_to(4, 50, 0.0) == openings.steps_to(4, 50, 1.0) == 0
    assert openings.steps_to(5, 50, 0.0) == 50
    assert openings.steps_to(8, 50, 1.0) == 50


@given(st.floats(0, 5), st.lists(st.floats(1, 500), min_size=1, max_size=20), st.floats(1, 300), st.floats(0, 2))
def test_more_takes_longer(free: float, ends: list[float], life: float, variation: float) -> None:
    openings = places(free, *sorted(ends))
    steps = [openings.steps_to(amount, life, variation) for amount in range(1, 60)]
    assert all(before <= after + 1e-6 for before, after in pairwise(steps))
    assert steps[0] >= 0.0
