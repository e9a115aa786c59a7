"""Random numbers that are a pure function of a seed and of which output token they are for.

Nothing is carried from token to token, so a sequence that is paused, resumed in another engine or verified out of
turn draws what it would have drawn anyway.
"""

import numpy as np
from numpy.typing import NDArray

_STRIDE = np.uint64(0x9E3779B97F4A7C15)
_MULTIPLIERS = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))
_SHIFTS = (np.uint64(30), np.uint64(27), np.uint64(31))
_UNUSED_BITS = np.uint64(11)


def uniform(seeds: NDArray[np.uint64], indices: NDArray[np.uint64]) -> NDArray[np.float64]:
    """Numbers in [0, 1), one for each pair of `seeds` [n] and `indices` [n].

    The generator is SplitMix64 (Steele, Lea, Flood 2014), which may jump to any index at no cost. A seed is mixed
    before it becomes a starting point: seeds in a row must not give the same numbers shifted.
    """
    numbers = _mix(_mix(seeds) + (indices + np.uint64(1)) * _STRIDE)
    return (numbers >> _UNUSED_BITS).astype(np.float64) * 2.0**-53


def _mix(numbers: NDArray[np.uint64]) -> NDArray[np.uint64]:
    numbers = (numbers ^ (numbers >> _SHIFTS[0])) * _MULTIPLIERS[0]
    numbers = (numbers ^ (numbers >> _SHIFTS[1])) * _MULTIPLIERS[1]
    return numbers ^ (numbers >> _SHIFTS[2])
