import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.forecast.learning import StepTimeModel


def test_it_finds_what_a_step_and_a_token_cost() -> None:
    time, rng = StepTimeModel(), random.Random(0)
    for _ in range(500):
        num_tokens = rng.choice([1, 16, 64, 512])
        time.observe(num_tokens, (0.004 + 0.0001 * num_tokens) * rng.uniform(0.8, 1.2))
    assert time.seconds(0) == pytest.approx(0.004, rel=0.3)
    assert time.seconds(1000) == pytest.approx(0.104, rel=0.1)


def test_steps_that_are_all_alike_say_nothing_of_a_token() -> None:
    time = StepTimeModel()
    for _ in range(10):
        time.observe(16, 0.01)
    assert time.seconds(16) == time.seconds(32) == pytest.approx(0.01)


def test_where_only_tokens_cost_no_step_is_free() -> None:
    time = StepTimeModel()
    for num_tokens, seconds in ((100, 0.001), (200, 0.101), (150, 0.05)):
        time.observe(num_tokens, seconds)
    assert 0.0 < time.seconds(1) < 0.002


def test_it_forgets() -> None:
    time = StepTimeModel()
    for seconds in (0.1, 0.001):
        for i in range(4000):
            time.observe(i % 64, seconds)
    assert time.seconds(32) == pytest.approx(0.001, rel=1.0)


@given(st.lists(st.tuples(st.integers(1, 4096), st.floats(0.0, 10.0)), min_size=1, max_size=50), st.integers(0, 8192))
def test_it_is_never_below_nothing(steps: list[tuple[int, float]], num_tokens: int) -> None:
    time = StepTimeModel()
    for tokens, seconds in steps:
        time.observe(tokens, seconds)
    assert time.seconds(num_tokens) >= -1e-9
