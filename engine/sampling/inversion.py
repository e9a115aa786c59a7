"""From a random number to a place: where cumulative weights pass that share of their sum."""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from engine.runners.base import FloatArray

CHUNK = 128
"""Tokens that are summed up in float32; sums of chunks are added in float64."""

Counts = NDArray[np.intp]
Numbers = NDArray[np.float64]


def sum_chunks(weights: FloatArray, out: FloatArray) -> None:
    """Sum each CHUNK of `weights` [n, num_chunks * CHUNK] into `out` [n, num_chunks]."""
    weights.reshape(len(weights), -1, CHUNK).sum(axis=2, out=out)


def invert(held: Numbers, uniform: Numbers) -> Counts:
    """The place [n] where cumulative `held` [n, width] first exceeds the share `uniform` (in [0, 1)) of its last.

    What stands there weighs something: at a weight of 0 the sum is what it was before.
    """
    return _first_above(held, uniform * held[:, -1])


def invert_chunks(sums: FloatArray, uniform: Numbers, weights_of: Callable[[Counts], FloatArray]) -> Counts:
    """The same for rows of which only the `sums` [n, num_chunks] of chunks are at hand.

    `weights_of(chunks)` are the weights [n, CHUNK] of one chunk [n] of each row.
    """
    held = np.cumsum(sums, axis=1, dtype=np.float64)
    chunk = invert(held, uniform)
    before = np.where(chunk > 0, held[np.arange(len(held)), chunk - 1], 0.0)
    within = np.cumsum(weights_of(chunk), axis=1, dtype=np.float64)
    return chunk * CHUNK + _first_above(within, uniform * held[:, -1] - before)


def _first_above(held: Numbers, targets: Numbers) -> Counts:
    # Rounding may lift a target to the sum or above it; then it is the last place that still adds something.
    limits = np.minimum(targets, np.nextafter(held[:, -1], -np.inf))
    return np.asarray(np.count_nonzero(held <= limits[:, None], axis=1))
