import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.sampling.sampler import sample
from engine.sampling.state import SamplingState, TokenCounts
from engine.types import SamplingParams

VOCAB = 50


def state(prompt: list[int] | None = None, stop: frozenset[int] = frozenset(), **fields: float) -> SamplingState:
    params = SamplingParams(**{"max_tokens": 100, "temperature": 0.0, **fields})  # type: ignore[arg-type]
    return SamplingState(params, prompt or [], stop, VOCAB)


def row(**logits: float) -> np.ndarray[tuple[int, int], np.dtype[np.float32]]:
    """One row of logits: t3=2.0 sets token 3, all others are 0."""
    values = np.zeros((1, VOCAB), np.float32)
    for name, value in logits.items():
        values[0, int(name[1:])] = value
    return values


def draws(
    logits: np.ndarray[tuple[int, int], np.dtype[np.float32]], temperature: float = 1.0, **fields: float
) -> list[int]:
    """4000 draws from the same row, each with a seed of its own."""
    states = [state([], frozenset(), temperature=temperature, seed=seed, **fields) for seed in range(4000)]
    drawn: list[int] = sample(np.repeat(logits, 4000, axis=0), states).tolist()
    return drawn


def test_greedy_takes_the_largest() -> None:
    logits = np.random.default_rng(0).normal(size=(8, VOCAB)).astype(np.float32)
    expected = logits.argmax(axis=1).tolist()
    assert sample(logits, [state() for _ in range(8)]).tolist() == expected


def test_repetition_penalty_is_that_of_transformers() -> None:
    one = state(prompt=[3, 4], repetition_penalty=2.0)
    assert sample(row(t3=3.0, t5=2.0), [one])[0] == 5, "a positive logit is divided"
    negative = np.full((1, VOCAB), -9.0, np.float32)
    negative[0, 4], negative[0, 6] = -2.0, -3.0
    assert sample(negative, [one])[0] == 6, "a negative one is multiplied"


def test_presence_and_frequency_count_the_output_only() -> None:
    one = state(prompt=[3], presence_penalty=1.0, frequency_penalty=0.5)
    assert sample(row(t3=1.0, t5=0.5), [one])[0] == 3
    one.observe(3)
    assert sample(row(t3=2.0, t5=0.6), [one])[0] == 5, "2 - 1 - 0.5 < 0.6"
    assert sample(row(t3=2.2, t5=0.6), [one])[0] == 3
    one.observe(3)
    assert sample(row(t3=2.2, t5=0.6), [one])[0] == 5, "2.2 - 1 - 2 * 0.5 < 0.6"


def test_min_tokens_holds_the_end_back() -> None:
    one = state(stop=frozenset({7}), min_tokens=2)
    logits = row(t7=9.0, t5=1.0)
    assert sample(logits.copy(), [one])[0] == 5
    one.observe(5)
    one.observe(5)
    assert sample(logits.copy(), [one])[0] == 7


def test_temperature_follows_the_softmax() -> None:
    logits = np.log(np.array([[0.6, 0.3, 0.1]], np.float32))
    shares = np.bincount(draws(logits), minlength=3) / 4000
    assert np.abs(shares - [0.6, 0.3, 0.1]).max() < 0.03
    squared = np.array([0.36, 0.09, 0.01]) / 0.46
    shares = np.bincount(draws(logits, temperature=0.5), minlength=3) / 4000
    assert np.abs(shares - squared).max() < 0.03


@pytest.mark.parametrize(
    ("fields", "allowed"),
    [
        ({"top_k": 1}, {0}),
        ({"top_k": 3}, {0, 1, 2}),
        ({"top_k": 99}, {0, 1, 2, 3}),
        ({"top_p": 0.5}, {0}),
        ({"top_p": 0.51}, {0, 1}),
        ({"top_p": 0.8}, {0, 1}),
        ({"top_k": 2, "top_p": 0.6}, {0}),
        ({"min_p": 0.45}, {0, 1}),
        ({"min_p": 1.0}, {0}),
        ({"top_k": 3, "min_p": 0.3}, {0, 1, 2}),
    ],
)
def test_filters_keep_exactly_what_they_say(fields: dict[str, float], allowed: set[int]) -> None:
    logits = np.log(np.array([[0.5, 0.3, 0.16, 0.04]], np.float32))
    assert set(draws(logits, **fields)) == allowed


@given(st.lists(st.tuples(st.integers(0, 999), st.floats(-5, 5)), min_size=1, max_size=30), st.integers(0, 2**32))
def test_only_candidates_are_drawn_from_a_large_vocabulary(kept: list[tuple[int, float]], seed: int) -> None:
    logits = np.full((20, 1000), -np.inf, np.float32)
    for token_id, logit in kept:
        logits[:, token_id] = logit
    states = [state(temperature=1.0, seed=seed + i) for i in range(20)]
    assert set(sample(logits, states).tolist()) <= {token_id for token_id, _ in kept}


def test_a_large_vocabulary_is_drawn_from_evenly() -> None:
    drawn = np.concatenate([sample(np.zeros((500, 1000), np.float32), chunk) for chunk in _crowds(8, 500)])
    assert abs(drawn.mean() - 499.5) < 20
    assert len(set(drawn.tolist())) > 950


def _crowds(count: int, size: int) -> list[list[SamplingState]]:
    return [[state(temperature=1.0, seed=i * size + j) for j in range(size)] for i in range(count)]


@given(st.integers(0, 2**64 - 1), st.integers(1, 6))
def test_a_seed_gives_the_same_tokens_alone_and_in_a_crowd(seed: int, place: int) -> None:
    rng = np.random.default_rng(1)
    steps = rng.normal(size=(5, 8, VOCAB)).astype(np.float32)

    def run(crowd: list[int]) -> list[int]:
        states = {i: state(temperature=0.8, top_p=0.9, seed=seed if i == place else i) for i in crowd}
        tokens = []
        for logits in steps:
            chosen = sample(logits[crowd].copy(), [states[i] for i in crowd])
            tokens.append(int(chosen[crowd.index(place)]))
        return tokens

    assert run([place]) == run(list(range(8)))


@given(st.lists(st.integers(0, 300), max_size=200))
def test_counts_are_right_as_they_grow(token_ids: list[int]) -> None:
    counts = TokenCounts(token_ids)
    expected = {token_id: token_ids.count(token_id) for token_id in token_ids}
    assert dict(zip(counts.ids.tolist(), counts.counts.tolist(), strict=True)) == expected
