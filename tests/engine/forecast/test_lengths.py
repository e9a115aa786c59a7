import random

import numpy as np
import pytest

from sluice.engine.forecast.learning import MAX_CLASSES, OutputLengths
from sluice.engine.sequence import RequestSize


def output(
    num_output: int, max_tokens: int = 1000, tenant: str = "", *, can_stop: bool = True, num_prompt: int = 50
) -> RequestSize:
    """Return the size of a sequence with some output."""
    return RequestSize(tenant, num_prompt, num_output, num_prompt + num_output, max_tokens, 1, can_stop)


def learned(outputs: list[RequestSize]) -> OutputLengths:
    lengths = OutputLengths()
    for each in outputs:
        lengths.observe(each)
    return lengths


def test_what_cannot_stop_uses_all_of_max_tokens() -> None:
    assert OutputLengths().expect(output(60, 100, can_stop=False)) == pytest.approx(40.0)


def test_it_learns_what_is_left_of_outputs_that_end_anywhere() -> None:
    rng = random.Random(0)
    lengths = learned([output(rng.randint(1, 1000)) for _ in range(3000)])
    left = [lengths.expect(output(done)) for done in (0, 500, 900)]
    np.testing.assert_allclose(left, [500, 250, 50], rtol=0.1, atol=25)


def test_an_output_that_was_cut_says_that_longer_ones_exist() -> None:
    lengths = learned([output(100, max_tokens=100) for _ in range(300)])
    assert lengths.expect(output(0, max_tokens=100)) == pytest.approx(100.0, rel=0.05)
    assert lengths.expect(output(0, max_tokens=400)) > 150.0


def test_tenants_are_told_apart() -> None:
    lengths = learned([output(20 if n % 2 else 200, tenant="short" if n % 2 else "long") for n in range(400)])
    assert lengths.expect(output(0, tenant="short")) == pytest.approx(20.0, rel=0.3)
    assert lengths.expect(output(0, tenant="long")) == pytest.approx(200.0, rel=0.3)
    assert 50.0 < lengths.expect(output(0, tenant="new")) < 200.0


def test_questions_about_documents_are_told_from_chats() -> None:
    """Both of one tenant and with the same max_tokens."""
    lengths = learned([output(20, num_prompt=900) if n % 2 else output(200, num_prompt=40) for n in range(400)])
    assert lengths.expect(output(0, num_prompt=800)) == pytest.approx(20.0, rel=0.3)
    assert lengths.expect(output(0, num_prompt=50)) == pytest.approx(200.0, rel=0.3)


def test_another_kind_of_load_is_noticed_within_two_dozen_endings() -> None:
    """Two hundred long answers would count for most of the next ones otherwise."""
    rng = random.Random(1)
    longs = [output(rng.randint(200, 500)) for _ in range(200)]
    shorts = [output(round(rng.lognormvariate(3.2, 0.5))) for _ in range(24)]
    assert learned([*longs, *shorts]).expect(output(0)) < 80.0


def test_lengths_that_vary_much_are_one_kind_of_load() -> None:
    rng = random.Random(2)
    mixed = [output(round(rng.lognormvariate(4.0, 1.0)) + 1, max_tokens=100_000) for _ in range(600)]
    assert learned(mixed).expect(output(0, max_tokens=100_000)) == pytest.approx(90.0, rel=0.3)


def test_at_first_only_the_short_ones_have_ended() -> None:
    """Four of 32 that started together have ended; the others are known to be longer."""
    lengths = learned([output(10) for _ in range(4)])
    naive = lengths.expect(output(0))
    lengths.note_running([output(60) for _ in range(28)])
    assert lengths.expect(output(0)) > 1.5 * naive


def test_lengths_forget() -> None:
    lengths = learned([output(length) for length in (800, 10) for _ in range(1500)])
    assert lengths.expect(output(0)) == pytest.approx(10.0, rel=0.3)


def test_there_is_at_least_a_token_left_and_at_most_the_limit() -> None:
    lengths = learned([output(10) for _ in range(500)])
    sequences = [output(999), output(5), output(0, max_tokens=3)]
    left = lengths.sample_left(sequences, 8, np.random.default_rng(0))
    assert left.shape == (3, 8) and left.min() >= 1.0
    assert left[0].max() <= 1.0 and left[2].max() <= 3.0
    assert lengths.sample_left([], 8, np.random.default_rng(0)).shape == (0, 8)


def test_it_keeps_a_bounded_number_of_classes() -> None:
    lengths = learned([output(5, tenant=str(number)) for number in range(2 * MAX_CLASSES)])
    assert len(lengths._classes) <= MAX_CLASSES
