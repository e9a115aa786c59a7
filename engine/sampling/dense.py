"""Filters and draw for one row by all of its tokens: exact for any distribution, however flat."""

import numpy as np

from engine.runners.base import FloatArray
from engine.sampling.draws import Draws
from engine.sampling.inversion import CHUNK, Counts, invert_chunks, sum_chunks
from engine.sampling.softmax import weigh
from engine.sampling.typical import keep_typical, mean_of

_STEP = 32
_MARGIN = 0.1
"""Every 32nd token tells where top_p ends, but for about this part of the share that is cut off."""

_FEW = 4096
"""So many weights are sorted sooner than narrowed down."""


def draw_from_all(logits: FloatArray, draws: Draws) -> Counts:
    """Token ids [n]."""
    num_chunks = -(-logits.shape[1] // CHUNK)
    weights = np.zeros((1, num_chunks * CHUNK), np.float32)
    token_ids = np.empty(len(draws.rows), np.intp)
    for index in range(len(token_ids)):
        token_ids[index] = _draw(logits, draws.those(slice(index, index + 1)), weights)[0]
    return token_ids


def _draw(logits: FloatArray, draw: Draws, buffer: FloatArray) -> Counts:
    """The token id [1] of the one row of `draw`. `buffer` [1, whole chunks] is zero past the vocabulary's end."""
    row = int(draw.rows[0])
    weights = weigh(logits[row : row + 1], draw.peaks, draw.sharpness, out=buffer[:, : logits.shape[1]])
    # Masks are multiplied with: setting by them takes ten times as long where they are in no pattern.
    weights *= weights >= _least_kept(weights[0], draw)
    if draw.typical_p[0] < 1:
        mass = weights.sum(axis=1, dtype=np.float64)
        weights[:] = keep_typical(weights, draw.typical_p * mass, mean_of(weights, mass))[0]
    sums = np.empty((1, buffer.shape[1] // CHUNK), np.float32)
    sum_chunks(buffer, sums)
    return invert_chunks(sums, draw.uniform, lambda chunk: buffer.reshape(-1, CHUNK)[chunk])


def _least_kept(weights: FloatArray, draw: Draws) -> np.float32:
    """The least of `weights` [vocab_size] that top_k, top_p and min_p keep."""
    top_k, top_p = int(draw.top_k[0]), float(draw.top_p[0])
    least = np.float32(draw.min_p[0])
    if top_k < len(weights):
        of_top_k = np.partition(weights, -top_k)[-top_k]
        least = max(least, of_top_k)
        weights = weights[np.flatnonzero(weights >= of_top_k)]
    if top_p < 1:
        least = max(least, _least_of_nucleus(weights, top_p))
    return least


def _least_of_nucleus(weights: FloatArray, top_p: float) -> np.float32:
    """The weight of the token that crosses `top_p`, which is kept: the set must hold at least that much."""
    wanted = top_p * _sum(weights)
    before, weights = _around(weights, wanted, top_p) if len(weights) > _FEW else (0.0, weights)
    if not len(weights):  # rounding put the crossing behind the last that weighs
        return np.float32(0)
    descending = np.sort(weights)[::-1]
    crossing = np.cumsum(descending, dtype=np.float64).searchsorted(wanted - before)
    return np.float32(descending[min(int(crossing), len(descending) - 1)])


def _around(weights: FloatArray, wanted: float, top_p: float) -> tuple[float, FloatArray]:
    """Those weights among which, in descending order, the sum reaches `wanted`, and what all larger ones sum up to.

    A sample tells between which two weights that is likely to be. Wherever it is, the answer is right.
    """
    sample = np.sort(weights[::_STEP])[::-1]
    held = np.cumsum(sample, dtype=np.float64)
    shares = np.array([top_p - _MARGIN * (1 - top_p), top_p + _MARGIN * (1 - top_p)])
    upper, lower = sample[np.minimum(held.searchsorted(shares * held[-1]), len(sample) - 1)]
    is_above = weights > upper
    above = _sum(weights * is_above)
    if above >= wanted:
        return 0.0, weights[np.flatnonzero(is_above)]
    middle = weights[np.flatnonzero((weights > lower) & ~is_above)]
    up_to_lower = above + _sum(middle)
    if up_to_lower >= wanted:
        return above, middle
    # Together, those that are lighter than this hold less than what is cut off.
    negligible = (1 - top_p) * wanted / top_p / len(weights)
    return up_to_lower, weights[np.flatnonzero((weights <= lower) & (weights >= negligible))]


def _sum(weights: FloatArray) -> float:
    """Sum in chunks, as everywhere."""
    whole = len(weights) // CHUNK * CHUNK
    sums = np.empty((1, whole // CHUNK), np.float32)
    sum_chunks(weights[None, :whole], sums)
    return float(sums.sum(dtype=np.float64) + weights[whole:].sum(dtype=np.float64))
