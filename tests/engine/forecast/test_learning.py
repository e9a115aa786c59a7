import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.forecast.learning import OutputLengths, StepTimeModel


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


def test_until_told_otherwise_all_is_used() -> None:
    left = OutputLengths().tokens_left(np.array([0.0, 60.0]), np.array([100.0, 100.0]))
    np.testing.assert_allclose(left.mean(axis=1), [100, 40])


def test_it_learns_what_is_left_of_sequences_that_end_anywhere() -> None:
    usage, rng = OutputLengths(), random.Random(0)
    for _ in range(3000):
        usage.observe(1000, rng.randint(1, 1000))
    left = usage.tokens_left(np.array([0.0, 500.0, 900.0]), np.full(3, 1000.0)).mean(axis=1)
    np.testing.assert_allclose(left, [500, 250, 50], rtol=0.15)
    assert usage.mean == pytest.approx(0.5, abs=0.05)
    assert usage.variation == pytest.approx(1 / 3, abs=0.1)


def test_lengths_that_are_all_alike_do_not_vary() -> None:
    usage = OutputLengths()
    for _ in range(1000):
        usage.observe(128, 128)
    assert usage.variation == pytest.approx(0.0, abs=1e-6)


def test_output_lengths_forget() -> None:
    usage = OutputLengths()
    for num_output in (100, 10):
        for _ in range(1500):
            usage.observe(100, num_output)
    assert usage.mean == pytest.approx(0.1, abs=0.01)


def test_a_running_sequence_has_at_least_a_token_left() -> None:
    usage = OutputLengths()
    for _ in range(2000):
        usage.observe(100, 10)
    assert usage.tokens_left(np.array([99.0, 100.0]), np.array([100.0, 100.0])).min() >= 1.0
