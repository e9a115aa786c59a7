import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice.engine.forecast.learning import StepTimeModel


def test_it_finds_what_a_step_a_sequence_and_a_token_of_a_prompt_cost() -> None:
    time, rng = StepTimeModel(), random.Random(0)
    for _ in range(800):
        num_seqs, num_prefill = rng.randint(1, 32), rng.choice([0, 0, 64, 512])
        time.observe(num_seqs, num_prefill, (0.004 + 0.0001 * num_seqs + 0.00003 * num_prefill) * rng.uniform(0.8, 1.2))
    assert time.seconds(1) == pytest.approx(0.0041, rel=0.15)
    assert time.seconds(32) == pytest.approx(0.0072, rel=0.15)
    assert time.seconds(32, 512) == pytest.approx(0.0226, rel=0.15)


def test_steps_of_another_size_are_not_forgotten_and_not_drawn_a_line_through() -> None:
    """A step of 64 takes less than a line through those of 1 to 4 says, and thousands of small ones change nothing."""
    time, rng = StepTimeModel(), random.Random(0)
    for count, sizes in ((500, (48, 64)), (4000, (1, 2, 3, 4))):
        for _ in range(count):
            num_seqs = rng.choice(sizes)
            time.observe(num_seqs, 0, 0.0015 * num_seqs**0.4 * rng.uniform(0.9, 1.1))
    assert time.seconds(64) == pytest.approx(0.0015 * 64**0.4, rel=0.15)
    assert time.seconds(2) == pytest.approx(0.0015 * 2**0.4, rel=0.15)


def test_steps_that_are_all_alike_say_nothing_of_a_token() -> None:
    time = StepTimeModel()
    for _ in range(10):
        time.observe(16, 0, 0.01)
    assert time.seconds(16) == time.seconds(32, 100) == pytest.approx(0.01)


def test_a_machine_that_becomes_slow_is_noticed_within_some_dozens_of_steps() -> None:
    time = StepTimeModel()
    for number in range(1000):
        time.observe(8, number % 3, 0.01 if number < 900 else 0.03)
    assert time.seconds(8) == pytest.approx(0.024, rel=0.2)
    soon, late = time.elapsed(np.array([10.0, 5000.0]), 8, np.zeros(2))
    assert soon / 10 == pytest.approx(time.seconds(8), rel=0.05)
    assert late / 5000 < 0.7 * time.seconds(8), "it will not be slow for ever"


@given(
    st.lists(st.tuples(st.integers(1, 64), st.integers(0, 4096), st.floats(0.0, 10.0)), min_size=1, max_size=50),
    st.integers(0, 8192),
)
def test_no_step_takes_less_than_nothing(steps: list[tuple[int, int, float]], num_prefill: int) -> None:
    time = StepTimeModel()
    for num_seqs, tokens, seconds in steps:
        time.observe(num_seqs, tokens, seconds)
    assert time.seconds(1, num_prefill) >= 0.0
