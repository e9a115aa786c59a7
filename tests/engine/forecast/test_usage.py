import random

import numpy as np
import pytest

from engine.forecast.learning import OutputLengths


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


def test_it_forgets() -> None:
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
