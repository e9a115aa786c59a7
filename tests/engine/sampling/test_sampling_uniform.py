import numpy as np
import pytest
from numpy.typing import NDArray

from engine.sampling.draw import uniform


def numbers(seeds: NDArray[np.uint64], indices: NDArray[np.uint64]) -> NDArray[np.float64]:
    return uniform(*np.broadcast_arrays(seeds, indices))


def chi_square(values: NDArray[np.float64], num_bins: int) -> float:
    """Standard deviations by which the counts differ from what is expected of fair numbers."""
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
