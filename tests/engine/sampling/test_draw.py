"""Random draws: each filter against a plain reference, top tokens against all tokens, rows together and alone."""

from collections.abc import Callable, Iterator
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from sluice.engine.runners.base import Statistic
from sluice.engine.sampling.cores import ONE_CORE, Cores
from sluice.engine.sampling.draw import UNKNOWN, draw_from_top_tokens
from sluice.engine.sampling.many_tokens import _Room, draw_from_all_tokens, keep_share
from sluice.engine.sampling.sampler import collect_draws, uniform
from sluice.engine.sampling.scan import scan
from sluice.engine.sampling.state import SamplingState
from sluice.engine.sampling.top_tokens import top_tokens
from sluice.engine.types import SamplingParams
from tests.engine.sampling.host import sample
from tests.engine.sampling.reference import may_draw, probabilities, tokens_possible

FILTERS: list[dict[str, float]] = [
    {},
    {"top_k": 1},
    {"top_k": 40},
    {"top_k": 700},
    {"top_p": 0.9},
    {"top_p": 0.3},
    {"top_p": 0.999},
    {"min_p": 0.1},
    {"min_p": 0.001},
    {"typical_p": 0.2},
    {"typical_p": 0.95},
    {"top_k": 50, "top_p": 0.8, "min_p": 0.02},
    {"top_k": 300, "typical_p": 0.6},
    {"top_p": 0.9, "typical_p": 0.5},
    {"min_p": 0.05, "typical_p": 0.5},
]

Logits = NDArray[np.float32]


@pytest.fixture
def cores() -> Iterator[Cores]:
    both = Cores(2)
    yield both
    both.close()


def params(**fields: float) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 100, **fields})  # type: ignore[arg-type]


def states_of(wanted: list[SamplingParams], vocab_size: int, seed: int = 0) -> list[SamplingState]:
    """Return a state for each of the parameters, with different seeds."""
    seeded = [_with_seed(one, seed + index) for index, one in enumerate(wanted)]
    return [SamplingState(one, [1], frozenset(), vocab_size) for one in seeded]


def _with_seed(one: SamplingParams, seed: int) -> SamplingParams:
    return SamplingParams(**{**{name: getattr(one, name) for name in one.__struct_fields__}, "seed": seed})


def number_of(state: SamplingState) -> float:
    return float(uniform(np.array([state.seed], np.uint64), np.array([state.num_output], np.uint64))[0])


def peaked(rng: np.random.Generator, num_rows: int, vocab_size: int) -> Logits:
    """Return logits with some likely tokens and many unlikely ones, as of language models."""
    logits = rng.normal(0, 1.5, (num_rows, vocab_size)).astype(np.float32)
    for row in logits:
        row[rng.choice(vocab_size, min(12, vocab_size), replace=False)] += np.linspace(12, 5, min(12, vocab_size))
    return logits


def flat(rng: np.random.Generator, num_rows: int, vocab_size: int) -> Logits:
    return rng.normal(0, 1, (num_rows, vocab_size)).astype(np.float32)


def tied(rng: np.random.Generator, num_rows: int, vocab_size: int) -> Logits:
    """Return logits with few distinct values, as after rounding to a short format."""
    return np.round(rng.normal(0, 3, (num_rows, vocab_size))).astype(np.float32)


@pytest.mark.parametrize("make", [peaked, flat, tied])
@pytest.mark.parametrize(
    ("vocab_size", "temperatures"), [(7, (1.0,)), (600, (0.6, 1.3)), (5003, (1.6,)), (33_004, (1.3,))]
)
def test_every_combination_of_filters_draws_what_the_plain_reference_draws(
    make: Callable[[np.random.Generator, int, int], Logits],
    vocab_size: int,
    temperatures: tuple[float, ...],
    cores: Cores,
) -> None:
    """Together on two cores, and each alone on one. Rows of more than 2^15 tokens are narrowed down."""
    choices = product(temperatures, (0, 1, 40, 400), (1.0, 0.9, 0.4), (0.0, 0.02), (1.0, 0.7))
    names = ("temperature", "top_k", "top_p", "min_p", "typical_p")
    wanted = [params(**dict(zip(names, values, strict=True))) for values in choices]
    logits = make(np.random.default_rng(vocab_size), len(wanted), vocab_size)
    states = states_of(wanted, vocab_size)
    chosen = sample(logits, states, cores=cores).token_ids.tolist()
    for row, state, token_id in zip(logits, states, chosen, strict=True):
        assert sample(row[None], [state]).token_ids.tolist() == [token_id], "alone as in company"
        assert may_draw(token_id, row, state.params, number_of(state)), state.params


def drawn_both_ways(logits: Logits, states: list[SamplingState]) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """Return the tokens of each row, which is filtered, from the top tokens and from all tokens."""
    draws = collect_draws(states, np.arange(len(states)))
    found = scan(logits, draws.rows, draws.sharpness, Statistic.MEAN, ONE_CORE)
    top = top_tokens(logits, draws.rows, found.maxima, found.coarse, 128)
    return draw_from_top_tokens(top, draws, found), draw_from_all_tokens(logits, draws, found, ONE_CORE)


@settings(deadline=None, max_examples=30)
@given(
    st.integers(0, 2**32),
    st.sampled_from([peaked, flat, tied]),
    st.sampled_from([1500, 5003, 20_000]),
    st.floats(0.05, 2.0),
)
def test_the_shortlist_knows_or_draws_the_same_as_all_tokens(
    seed: int, make: Callable[[np.random.Generator, int, int], Logits], vocab_size: int, temperature: float
) -> None:
    logits = make(np.random.default_rng(seed), len(FILTERS) - 1, vocab_size)
    states = states_of([params(temperature=temperature, **fields) for fields in FILTERS[1:]], vocab_size, seed)
    short, dense = drawn_both_ways(logits, states)
    known = short != UNKNOWN
    differing = np.flatnonzero(known & (short != dense))
    for row in differing:  # only where rounding decides
        assert {int(short[row]), int(dense[row])} <= tokens_possible(
            logits[row], states[row].params, number_of(states[row])
        )


def test_the_shortlist_suffices_for_distributions_of_language_models() -> None:
    usual = [FILTERS[index] for index in (1, 2, 4, 5, 7, 9, 10, 11, 13)]
    logits = peaked(np.random.default_rng(0), len(usual), 20_000)
    states = states_of([params(temperature=0.8, **fields) for fields in usual], 20_000)
    assert (drawn_both_ways(logits, states)[0] != UNKNOWN).all()


def test_shares_drawn_are_those_of_the_distribution() -> None:
    logits = peaked(np.random.default_rng(5), 1, 3000)
    for fields in ({}, {"top_p": 0.9}, {"min_p": 0.05}, {"typical_p": 0.8}):
        wanted = params(temperature=1.0, **fields)
        states = states_of([wanted] * 4000, 3000)
        drawn = np.concatenate(
            [
                sample(np.repeat(logits, 200, axis=0), states[begin : begin + 200]).token_ids
                for begin in range(0, 4000, 200)
            ]
        )
        expected = probabilities(logits[0], wanted)
        shares = np.bincount(drawn, minlength=3000) / 4000
        assert np.abs(shares - expected).max() < 0.03, fields
        assert set(drawn.tolist()) <= set(np.flatnonzero(expected).tolist()), fields


@settings(deadline=None, max_examples=15)
@given(st.integers(0, 2**64 - 1), st.integers(0, len(FILTERS) - 1))
def test_a_seed_gives_the_same_tokens_alone_and_in_any_crowd(seed: int, place: int) -> None:
    rng = np.random.default_rng(1)
    steps = [peaked(rng, len(FILTERS), 2000) if step % 2 else flat(rng, len(FILTERS), 2000) for step in range(3)]

    def run(crowd: list[int]) -> list[int]:
        wanted = {i: _with_seed(params(temperature=0.8, **FILTERS[i]), seed if i == place else i) for i in crowd}
        states = {i: SamplingState(wanted[i], [1], frozenset(), 2000) for i in crowd}
        tokens = []
        for logits in steps:
            chosen = sample(logits[crowd].copy(), [states[i] for i in crowd]).token_ids.tolist()
            for i, token_id in zip(crowd, chosen, strict=True):
                states[i].observe(token_id)
            tokens.append(chosen[crowd.index(place)])
        return tokens

    assert run([place]) == run(list(range(len(FILTERS)))) == run([(place + 3) % len(FILTERS), place])


def test_rows_may_stand_anywhere_in_the_logits() -> None:
    logits = peaked(np.random.default_rng(2), 12, 4000)
    wanted = [params(temperature=0.9, **fields) for fields in FILTERS[:6]]
    rows = np.array([7, 2, 3, 4, 11, 0])
    picked = sample(logits.copy(), states_of(wanted, 4000), rows).token_ids.tolist()
    assert picked == sample(logits[rows].copy(), states_of(wanted, 4000)).token_ids.tolist()


@pytest.mark.parametrize("temperature", [1e-40, 1e-6, 0.01])
def test_a_tiny_temperature_draws_the_likeliest(temperature: float) -> None:
    logits = peaked(np.random.default_rng(3), 4, 3000)
    logits[:, 5] = np.finfo(np.float32).min
    wanted = [params(temperature=temperature, **fields) for fields in ({}, {"top_p": 0.9}, {"typical_p": 0.9})]
    states = states_of([*wanted, params(temperature=temperature, min_p=0.5)], 3000)
    assert sample(logits.copy(), states).token_ids.tolist() == logits.argmax(axis=1).tolist()


@settings(deadline=None, max_examples=30)
@given(st.lists(st.tuples(st.integers(0, 2999), st.floats(-5, 5)), min_size=1, max_size=30), st.integers(0, 2**32))
def test_tokens_ruled_out_are_never_drawn(kept: list[tuple[int, float]], seed: int) -> None:
    logits = np.full((len(FILTERS), 3000), -np.inf, np.float32)
    for token_id, logit in kept:
        logits[:, token_id] = logit
    states = states_of([params(temperature=1.0, **fields) for fields in FILTERS], 3000, seed)
    assert set(sample(logits, states).token_ids.tolist()) <= {token_id for token_id, _ in kept}


def test_all_tokens_alike_are_all_drawn() -> None:
    for fields in (
        {},
        {"top_p": 0.999},
        {"top_k": 3},
        {"min_p": 1.0},
        {"typical_p": 0.9},
        {"min_p": 0.1, "typical_p": 0.9},
    ):
        states = states_of([params(temperature=1.0, **fields)] * 600, 2500)
        drawn = sample(np.zeros((600, 2500), np.float32), states).token_ids
        assert abs(drawn.mean() - 1249.5) < 120, f"{fields}: ties at the border all stay"
        assert len(set(drawn.tolist())) > 400


LAYOUTS: dict[str, Callable[[np.random.Generator], NDArray[np.float64]]] = {
    "no order": lambda rng: rng.exponential(size=20_000),
    "every 32nd is heavy": lambda rng: rng.exponential(size=20_000) * np.where(np.arange(20_000) % 32, 1e-4, 1),
    "every 32nd is light": lambda rng: rng.exponential(size=20_000) * np.where(np.arange(20_000) % 32, 1, 1e-4),
    "heavy tail": lambda rng: np.exp(rng.normal(0, 4, 20_000)),
    "all alike": lambda rng: np.ones(20_000),
    "mostly nothing": lambda rng: np.where(rng.random(20_000) < 0.01, rng.random(20_000), 0),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("top_p", [0.001, 0.3, 0.9, 0.9999])
def test_the_end_of_the_nucleus_is_found_where_the_sample_misleads(layout: str, top_p: float) -> None:
    weights = LAYOUTS[layout](np.random.default_rng(4)).astype(np.float32)
    room = _Room(len(weights))
    room.weights[:] = weights
    keep_share(room, room.weights, top_p * float(weights.sum(dtype=np.float64)), top_p)
    found = room.weights[room.weights > 0].min()
    assert (room.weights == np.where(weights >= found, weights, 0)).all()
    descending = np.sort(weights)[::-1]
    held = np.cumsum(descending, dtype=np.float64)
    near = np.searchsorted(held, [(top_p - 1e-6) * held[-1], (top_p + 1e-6) * held[-1]])
    low, high = descending[np.minimum(near, len(descending) - 1)]
    assert high <= found <= low


def numbers(seeds: NDArray[np.uint64], indices: NDArray[np.uint64]) -> NDArray[np.float64]:
    return uniform(*np.broadcast_arrays(seeds, indices))


def chi_square(values: NDArray[np.float64], num_bins: int) -> float:
    """Return the standard deviations by which the counts differ from those of fair numbers."""
    counts = np.histogram(values, num_bins, (0, 1))[0]
    expected = values.size / num_bins
    return float((((counts - expected) ** 2 / expected).sum() - (num_bins - 1)) / np.sqrt(2 * (num_bins - 1)))


SEEDS = {
    "in a row": np.arange(2000, dtype=np.uint64),
    "high bits only": np.arange(2000, dtype=np.uint64) << np.uint64(52),
    "strides of the generator": np.arange(2000, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15),
}


@pytest.mark.parametrize("kind", SEEDS)
def test_numbers_are_even_along_seeds_and_along_tokens(kind: str) -> None:
    seeds = SEEDS[kind]
    table = numbers(seeds[:, None], np.arange(200, dtype=np.uint64)[None, :])
    assert (table >= 0).all()
    assert (table < 1).all()
    assert abs(chi_square(table, 1000)) < 4, "all together"
    by_token = [chi_square(table[:, index], 50) for index in range(200)]
    by_seed = [chi_square(table[index], 20) for index in range(2000)]
    assert np.abs(by_token).max() < 6, "one output token of all seeds"
    assert abs(np.mean(by_seed)) < 0.1, "all output tokens of one seed"


@pytest.mark.parametrize("kind", SEEDS)
def test_neighbours_tell_nothing_about_each_other(kind: str) -> None:
    table = numbers(SEEDS[kind][:, None], np.arange(200, dtype=np.uint64)[None, :])
    for first, second in ((table[:, :-1], table[:, 1:]), (table[:-1], table[1:]), (table[:-1, 1:], table[1:, :-1])):
        pairs = np.floor(first * 20) * 20 + np.floor(second * 20)
        assert abs(chi_square((pairs.ravel() + 0.5) / 400, 400)) < 4


def test_a_number_depends_on_its_seed_and_index_alone() -> None:
    seeds = np.array([3, 2**64 - 1, 0], np.uint64)
    indices = np.array([7, 0, 2**40], np.uint64)
    together = uniform(seeds, indices)
    alone = [uniform(seeds[i : i + 1], indices[i : i + 1])[0] for i in range(3)]
    assert together.tolist() == alone
    assert len(set(alone)) == 3
