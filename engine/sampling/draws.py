"""The parameters of rows that draw at random, from the states of their sequences, and the random numbers of these."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from sluice.engine.arrays import Doubles, Rows
from sluice.engine.runners.base import Draws
from sluice.engine.sampling.state import SamplingState

_STRIDE = np.uint64(0x9E3779B97F4A7C15)
_MULTIPLIERS = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))
_SHIFTS = (np.uint64(30), np.uint64(27), np.uint64(31))
_UNUSED_BITS = np.uint64(11)


def uniform(seeds: NDArray[np.uint64], indices: NDArray[np.uint64]) -> Doubles:
    """Return numbers in [0, 1), one for each pair of `seeds` [n] and `indices` [n]. The generator is SplitMix64
    (Steele, Lea, Flood 2014), which can jump to any index at no cost. A seed is mixed before it becomes a starting
    point, so that consecutive seeds do not give the same numbers shifted."""
    numbers = _mix(_mix(seeds) + (indices + np.uint64(1)) * _STRIDE)
    return (numbers >> _UNUSED_BITS).astype(np.float64) * 2.0**-53


def _mix(numbers: NDArray[np.uint64]) -> NDArray[np.uint64]:
    numbers = (numbers ^ (numbers >> _SHIFTS[0])) * _MULTIPLIERS[0]
    numbers = (numbers ^ (numbers >> _SHIFTS[1])) * _MULTIPLIERS[1]
    return numbers ^ (numbers >> _SHIFTS[2])


def collect_draws(states: Sequence[SamplingState], rows: Rows, num_ahead: Sequence[int] | int = 0) -> Draws:
    """Collect the parameters of `states`, none of which is greedy, for their `rows` of the logits. The states have not
    observed their last `num_ahead` tokens yet."""
    temperature, top_k, top_p, min_p, typical_p = np.array([state.filters for state in states]).T
    seeds = np.array([state.seed for state in states], np.uint64)
    indices = np.array([state.num_output for state in states], np.uint64) + np.array(num_ahead, np.uint64)
    sharpness = (1 / temperature).astype(np.float32)
    numbers = uniform(seeds, indices)
    wanted = np.array([state.wanted for state in states], np.intp)
    return Draws(rows, sharpness, top_k.astype(np.intp), top_p, min_p, typical_p, numbers, wanted)
