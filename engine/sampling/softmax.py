"""Arithmetic on rows of logits over a large vocabulary: softmax weights, their sums, and inversion. A weight is a
token's probability divided by that of the most likely one."""

from collections.abc import Callable

import numpy as np

from sluice.engine.arrays import Doubles, FloatArray, Ids

CHUNK = 128
"""Number of consecutive tokens that are summed in float32; the sums of chunks are added in float64."""

_FOLD = 8
"""Parts of a row that are added to each other first: eight long vector operations take half of the time of one sum."""

_TINY = np.finfo(np.float32).tiny


# -- weights


def weigh(values: FloatArray, peaks: FloatArray, sharpness: FloatArray, out: FloatArray | None = None) -> FloatArray:
    """Return the weights of `values` [n, any]: exp((value - peak) * sharpness). `sharpness` [n] is 1 / temperature."""
    weights = scale(values, peaks, sharpness, out)
    return np.exp(weights, out=weights)


def scale(values: FloatArray, peaks: FloatArray, sharpness: FloatArray, out: FloatArray | None = None) -> FloatArray:
    """Return (value - peak) * sharpness."""
    # A logit near float32's lowest may overflow here; its weight is then 0, which is right. A peak that is not finite
    # gives no weights, and whoever scans finds it.
    with np.errstate(over="ignore", invalid="ignore"):
        scaled: FloatArray = np.subtract(values, peaks[:, None], out=out)
        if len(sharpness) > 1 and (sharpness != sharpness[0]).any():
            return np.multiply(scaled, sharpness[:, None], out=scaled)
        return np.multiply(scaled, sharpness[:1], out=scaled)  # in a third of the time


def logarithm(weights: FloatArray, out: FloatArray | None = None) -> FloatArray:
    """Return the logarithm, finite for a weight of 0 too, so that their product is 0."""
    logs: FloatArray = np.maximum(weights, _TINY, out=out)
    return np.log(logs, out=logs)


def sum_chunks(weights: FloatArray, out: FloatArray | None = None) -> FloatArray:
    """Return the sums [n, num_chunks] of each CHUNK of `weights` [n, num_chunks * CHUNK]."""
    sums: FloatArray = weights.reshape(len(weights), -1, CHUNK).sum(axis=2, out=out)
    return sums


def sum_rows(weights: FloatArray) -> Doubles:
    """Return the sum of each row [n] of `weights` [n, any]."""
    width = weights.shape[1] // _FOLD
    folded = weights[:, : width * _FOLD].reshape(len(weights), _FOLD, width).sum(axis=1)
    rest = weights[:, width * _FOLD :].sum(axis=1)
    total: Doubles = folded.astype(np.float64).sum(axis=1) + rest
    return total


def num_below(weights: FloatArray, targets: Doubles) -> Ids:
    """Return how many cumulative sums [n] of each row of `weights` [n, any] are below its target [n]."""
    num_rows, width = weights.shape
    if width <= CHUNK:
        return np.asarray(np.count_nonzero(np.cumsum(weights, axis=1, dtype=np.float64) < targets[:, None], axis=1))
    whole = width // CHUNK * CHUNK
    cumulative = np.cumsum(sum_chunks(weights[:, :whole]), axis=1, dtype=np.float64)
    chunk = np.count_nonzero(cumulative < targets[:, None], axis=1)
    before = np.where(chunk > 0, cumulative[np.arange(num_rows), chunk - 1], 0.0)
    places = chunk[:, None] * CHUNK + np.arange(CHUNK)
    part = np.where(places < width, weights[np.arange(num_rows)[:, None], np.minimum(places, width - 1)], 0)
    within = np.cumsum(part, axis=1, dtype=np.float64)
    found: Ids = chunk * CHUNK + np.count_nonzero(within < (targets - before)[:, None], axis=1)
    return found


# -- inversion: from a random number to the place where cumulative weights pass that share of their sum


def invert_chunks(sums: FloatArray, uniform: Doubles, chunk_weights: Callable[[Ids], FloatArray]) -> Ids:
    """Return the place [n] where the weights of a row, in order, first sum to more than the share `uniform`, in [0, 1),
    of them all. Only the `sums` [n, num_chunks] of chunks are known; `chunk_weights(chunks)` returns the weights
    [n, CHUNK] of one chunk [n] of each row. The place has a weight above 0: at one of 0 the sum does not change."""
    cumulative = np.cumsum(sums, axis=1, dtype=np.float64)
    total = cumulative[:, -1]
    chunk = _first_above(cumulative, uniform * total)
    before = np.where(chunk > 0, cumulative[np.arange(len(cumulative)), chunk - 1], 0.0)
    within = np.cumsum(chunk_weights(chunk), axis=1, dtype=np.float64)
    return chunk * CHUNK + _first_above(within, uniform * total - before)


def _first_above(cumulative: Doubles, targets: Doubles) -> Ids:
    # Rounding may lift a target to the sum or above it; then it is the last place with a weight.
    limits = np.minimum(targets, np.nextafter(cumulative[:, -1], -np.inf))
    return np.asarray(np.count_nonzero(cumulative <= limits[:, None], axis=1))
