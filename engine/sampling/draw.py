"""One token for each row that draws at random.

The token is the one where the cumulative weight, in order of the ids, of what the filters keep passes the share
`uniform` of it. So it depends on nothing but distribution, parameters and random number, whichever way it is found.
The filters, in transformers' order: top_k, top_p of what is left, min_p, typical_p of what is left. The first three
keep whatever weighs at least as much as the least token that they keep, so ties at the border all stay.

Numpy alone is fast enough. At 64 rows of 150,000 logits the sum of the exponentials costs about 10 ms and the
likeliest tokens 5, where a TopK with ReduceLogSumExp inside the OpenVINO graph costs 26 to 29, sees logits rounded to
bf16, and would have to be written for every runtime.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from engine.runners.base import FloatArray
from engine.sampling.softmax import (
    CHUNK,
    Counts,
    Numbers,
    Rows,
    chunk_sums,
    invert_chunks,
    shortlist,
    sum_chunks,
    totals,
    totals_and_means,
    weigh,
)
from engine.sampling.state import SamplingState


def draw(logits: FloatArray, draws: Draws) -> Counts:
    """Token ids [n] drawn from the softmax of `logits[draws.rows]` at each row's temperature, after its filters."""
    token_ids = np.empty(len(draws.rows), np.intp)
    is_filtered = draws.is_filtered(logits.shape[1])
    for mask, how in ((is_filtered, _draw_filtered), (~is_filtered, _draw_unfiltered)):
        if mask.any():
            token_ids[mask] = how(logits, draws.those(mask))
    return token_ids


def _draw_unfiltered(logits: FloatArray, draws: Draws) -> Counts:
    sums = chunk_sums(logits, draws.rows, draws.peaks, draws.sharpness)
    return invert_chunks(sums, draws.uniform, lambda chunk: _weights_of(logits, draws, chunk))


def _weights_of(logits: FloatArray, draws: Draws, chunk: Counts) -> FloatArray:
    """Weights [n, CHUNK] of the tokens of each row's `chunk`, 0 past the vocabulary's end."""
    token_ids = chunk[:, None] * CHUNK + np.arange(CHUNK)
    values = logits[draws.rows[:, None], np.minimum(token_ids, logits.shape[1] - 1)]
    values[token_ids >= logits.shape[1]] = -np.inf
    return weigh(values, draws.peaks, draws.sharpness)


def _draw_filtered(logits: FloatArray, draws: Draws) -> Counts:
    token_ids = draw_from_shortlist(logits, draws, *_of_all(logits, draws))
    left = np.flatnonzero(token_ids == UNKNOWN)
    token_ids[left] = draw_from_all(logits, draws.those(left))
    return token_ids


def _of_all(logits: FloatArray, draws: Draws) -> tuple[Numbers, Numbers]:
    """Sum [n] of all weights and expectation [n] of their logarithm, NaN for rows that need neither."""
    sums, means = np.full((2, len(draws.rows)), np.nan)
    mask = draws.needs_total(logits.shape[1])
    if mask.any():
        part = draws.those(mask)
        sums[mask] = totals(logits, part.rows, part.peaks, part.sharpness)
    mask = draws.needs_mean(logits.shape[1])
    if mask.any():
        part = draws.those(mask)
        sums[mask], means[mask] = totals_and_means(logits, part.rows, part.peaks, part.sharpness)
    return sums, means


Mask = NDArray[np.bool_]
_Numbers = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Draws:
    """One entry a row that draws; all arrays are [n]."""

    rows: Rows
    """Rows of the logits."""
    peaks: FloatArray
    """Their largest logits."""
    sharpness: FloatArray
    """1 / temperature"""
    top_k: NDArray[np.intp]
    """At least the size of the vocabulary where it is off."""
    top_p: _Numbers
    min_p: _Numbers
    typical_p: _Numbers
    uniform: _Numbers
    """The random number of the token to draw, in [0, 1)."""

    def those(self, which: Rows | Mask | slice) -> "Draws":
        """The entries `which`."""
        return Draws(*(getattr(self, field.name)[which] for field in fields(self)))

    def is_filtered(self, vocab_size: int) -> Mask:
        """Whether any filter is on."""
        mask: Mask = (self.top_k < vocab_size) | (self.top_p < 1) | (self.min_p > 0) | (self.typical_p < 1)
        return mask

    def needs_mean(self, vocab_size: int) -> Mask:
        """Whether typical_p is the only filter, so that its entropy is that of all tokens."""
        mask: Mask = (self.typical_p < 1) & ~((self.top_k < vocab_size) | (self.top_p < 1) | (self.min_p > 0))
        return mask

    def needs_total(self, vocab_size: int) -> Mask:
        """Whether the first filter keeps a share of all tokens' weight."""
        mask: Mask = (self.top_k >= vocab_size) & (self.top_p < 1)
        return mask


def draws_of(states: Sequence[SamplingState], rows: Rows, peaks: FloatArray) -> Draws:
    """What `states`, of which none is greedy, want of their `rows` of the logits."""
    temperature, top_k, top_p, min_p, typical_p = np.array([state.filters for state in states]).T
    seeds = np.array([state.seed for state in states], np.uint64)
    indices = np.array([state.num_output for state in states], np.uint64)
    sharpness = (1 / temperature).astype(np.float32)
    numbers = uniform(seeds, indices)
    return Draws(rows, peaks, sharpness, top_k.astype(np.intp), top_p, min_p, typical_p, numbers)


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


UNKNOWN = -1


def draw_from_shortlist(logits: FloatArray, draws: Draws, totals: Numbers, means: Numbers) -> Counts:
    """Token ids [n]; UNKNOWN where the likeliest tokens do not tell.

    `totals` and `means` [n] are of all tokens' weights, read where `draws.needs_total` or `draws.needs_mean`.
    """
    candidates = shortlist(logits, draws.rows)
    num_rows, width = candidates.values.shape
    chunks = np.zeros((num_rows, -(-width // CHUNK), CHUNK), np.float32)
    weights = weigh(candidates.values, draws.peaks, draws.sharpness, out=chunks.reshape(num_rows, -1)[:, :width])
    # Whatever is missing weighs no more than this. Where that is 0, nothing is missing.
    bound = weigh(candidates.bound[:, None], draws.peaks, draws.sharpness)[:, 0]
    least, is_cut = _least_kept(weights, bound, draws, logits.shape[1], totals)
    is_known = is_cut & ((least > bound) | (bound == 0))
    weights *= (weights >= least[:, None]) & (weights > bound[:, None])
    typical = np.flatnonzero(is_cut & (draws.typical_p < 1))
    if len(typical):
        part, is_all = draws.those(typical), draws.needs_mean(logits.shape[1])[typical]
        kept = _typical(weights[typical], bound[typical], part, is_all, totals[typical], means[typical])
        weights[typical], is_settled = kept
        is_known[typical] |= is_settled
    index = np.arange(num_rows)
    places = invert_chunks(chunks.sum(axis=2), draws.uniform, lambda chunk: chunks[index, chunk])
    return np.where(is_known, candidates.token_ids[index, np.minimum(places, width - 1)], UNKNOWN)


def _least_kept(
    weights: FloatArray, bound: FloatArray, draws: Draws, vocab_size: int, totals: Numbers
) -> tuple[FloatArray, Mask]:
    """The least weight [n] that top_k, top_p and min_p keep, not above the bound where it is not known.

    And whether top_k, on whose outcome top_p depends, is known or off.
    """
    descending = np.sort(weights, axis=1)[:, ::-1]
    width = max(int(np.count_nonzero(descending > bound[:, None], axis=1).max()), 1)
    descending = descending[:, :width]
    held = np.cumsum(descending, axis=1, dtype=np.float64)
    has_top_k = draws.top_k < vocab_size
    of_top_k = np.where(has_top_k, _at(descending, draws.top_k - 1), 0)
    num_kept = np.count_nonzero(descending >= of_top_k[:, None], axis=1)
    mass = np.where(has_top_k, held[np.arange(len(held)), num_kept - 1], totals)
    # The token that crosses top_p is kept: the set must hold at least that much.
    crossing = np.count_nonzero(held < (draws.top_p * mass)[:, None], axis=1)
    of_top_p = np.where(draws.top_p < 1, _at(descending, crossing), 0)
    least = np.maximum(np.maximum(of_top_k, of_top_p), draws.min_p.astype(np.float32))
    return least, ~has_top_k | (of_top_k > bound) | (bound == 0)


def _typical(
    weights: FloatArray, bound: FloatArray, draws: Draws, is_all: Mask, totals: Numbers, means: Numbers
) -> tuple[FloatArray, Mask]:
    """The weights [n, width] that typical_p keeps; and whether that is so although not all are here.

    `is_all`: it chooses among all tokens. Else among what other filters left.
    """
    mass = np.where(is_all, totals, weights.sum(axis=1, dtype=np.float64))
    mean = np.where(is_all, means, mean_of(weights, mass))
    kept, farthest = keep_typical(weights, draws.typical_p * mass, mean)
    # What is missing is less likely than the bound: farther off than it, where the bound is past the mean.
    is_settled: Mask = is_all & (farthest < mean - np.log(np.maximum(bound, np.finfo(np.float32).tiny)))
    return kept, is_settled


def _at(descending: FloatArray, places: Counts) -> FloatArray:
    """What stands at `places` [n], 0 past the end."""
    width = descending.shape[1]
    found: FloatArray = descending[np.arange(len(places)), np.minimum(places, width - 1)]
    return np.where(places < width, found, np.float32(0))


def mean_of(weights: FloatArray, mass: Numbers) -> Numbers:
    """Expectation [n] of the logarithm of the weights [n, width], which sum up to `mass`."""
    mean: Numbers = (weights * _logarithm(weights)).sum(axis=1, dtype=np.float64) / mass
    return mean


def keep_typical(weights: FloatArray, wanted: Numbers, mean: Numbers) -> tuple[FloatArray, FloatArray]:
    """The weights [n, width] nearest to `mean` that hold `wanted`, 0 for the others, and how far off they reach."""
    distance = np.abs(_logarithm(weights) - mean[:, None].astype(np.float32))
    order = np.argsort(distance, axis=1)
    held = np.cumsum(np.take_along_axis(weights, order, axis=1), axis=1, dtype=np.float64)
    last = np.minimum(np.count_nonzero(held < wanted[:, None], axis=1), weights.shape[1] - 1)
    rows = np.arange(len(order))
    farthest: FloatArray = distance[rows, order[rows, last]]
    return weights * (distance <= farthest[:, None]), farthest


def _logarithm(weights: FloatArray) -> FloatArray:
    """Of a weight of 0 it is finite too, so that the product of both is 0."""
    logarithm: FloatArray = np.log(np.maximum(weights, np.finfo(np.float32).tiny))
    return logarithm


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
        token_ids[index] = _draw_from_row(logits, draws.those(slice(index, index + 1)), weights)[0]
    return token_ids


def _draw_from_row(logits: FloatArray, draw: Draws, buffer: FloatArray) -> Counts:
    """The token id [1] of the one row of `draw`. `buffer` [1, whole chunks] is zero past the vocabulary's end."""
    row = int(draw.rows[0])
    weights = weigh(logits[row : row + 1], draw.peaks, draw.sharpness, out=buffer[:, : logits.shape[1]])
    # Masks are multiplied with: setting by them takes ten times as long where they are in no pattern.
    weights *= weights >= _least_kept_of_all(weights[0], draw)
    if draw.typical_p[0] < 1:
        mass = weights.sum(axis=1, dtype=np.float64)
        weights[:] = keep_typical(weights, draw.typical_p * mass, mean_of(weights, mass))[0]
    sums = np.empty((1, buffer.shape[1] // CHUNK), np.float32)
    sum_chunks(buffer, sums)
    return invert_chunks(sums, draw.uniform, lambda chunk: buffer.reshape(-1, CHUNK)[chunk])


def _least_kept_of_all(weights: FloatArray, draw: Draws) -> np.float32:
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
