"""Random numbers, a pure function of a seed and the index of the output token. No state is carried from token to token,
so a sequence that is preempted, resumed in another engine or verified out of turn draws the same numbers."""

import numpy as np
from numpy.typing import NDArray

from sluice.engine.arrays import Doubles

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
