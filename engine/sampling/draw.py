"""Draws one token for each row that samples at random.

The token is the one where the cumulative weight, in order of the ids, of the tokens that the filters keep passes the
share `uniform` of its sum. So it depends only on distribution, parameters and random number, whichever way it is found.
The filters, in transformers' order: top_k, top_p of the rest, min_p, typical_p of the rest. The first three keep each
token that weighs at least as much as the lightest that they keep, so all ties at the border stay.

Most distributions are decided by the top tokens of all rows at once; the rows that are not are drawn one by one from
all tokens. numpy alone is fast enough: for 64 rows of 150,000 logits the sum of the exponentials takes about 10 ms and
the top tokens 5, while a TopK with ReduceLogSumExp inside the OpenVINO graph takes 26 to 29, sees logits rounded to
bf16, and would have to be written for every runtime.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from engine.runners.base import FloatArray
from engine.sampling.softmax import (
    CHUNK,
    Doubles,
    Ids,
    Rows,
    chunk_sums,
    invert_chunks,
    sum_chunks,
    sum_weights,
    sum_weights_and_means,
    top_tokens,
    weigh,
)
from engine.sampling.state import SamplingState

Mask = NDArray[np.bool_]

UNKNOWN = -1
"""Stands for a token that the top tokens do not determine."""

_FEW = 4096
"""Up to this many weights are sorted rather than narrowed down."""
_STEP = 32
"""Every 32nd token is in the sample that estimates where top_p ends."""
_MARGIN = 0.1
"""Assumed error of that estimate, as a part of the share that is cut off."""


@dataclass(frozen=True, slots=True)
class Draws:
    """The parameters of the rows that draw at random, one entry a row; all arrays are [n]."""

    rows: Rows
    """Rows of the logits."""
    peaks: FloatArray
    """The largest logit of each row."""
    sharpness: FloatArray
    """1 / temperature."""
    top_k: NDArray[np.intp]
    """At least the size of the vocabulary if it is off."""
    top_p: Doubles
    min_p: Doubles
    typical_p: Doubles
    uniform: Doubles
    """The random number of the token to draw, in [0, 1)."""

    def select(self, which: Rows | Mask | slice) -> "Draws":
        """Return the entries `which`."""
        return Draws(*(getattr(self, field.name)[which] for field in fields(self)))

    def is_filtered(self, vocab_size: int) -> Mask:
        """Return whether any filter is on."""
        mask: Mask = (self.top_k < vocab_size) | (self.top_p < 1) | (self.min_p > 0) | (self.typical_p < 1)
        return mask

    def needs_mean(self, vocab_size: int) -> Mask:
        """Return whether typical_p is the only filter, so that its entropy is that of all tokens."""
        mask: Mask = (self.typical_p < 1) & ~((self.top_k < vocab_size) | (self.top_p < 1) | (self.min_p > 0))
        return mask

    def needs_total(self, vocab_size: int) -> Mask:
        """Return whether the first filter keeps a share of the weight of all tokens."""
        mask: Mask = (self.top_k >= vocab_size) & (self.top_p < 1)
        return mask


def collect_draws(states: Sequence[SamplingState], rows: Rows, peaks: FloatArray) -> Draws:
    """Collect the parameters of `states`, none of which is greedy, for their `rows` of the logits."""
    temperature, top_k, top_p, min_p, typical_p = np.array([state.filters for state in states]).T
    seeds = np.array([state.seed for state in states], np.uint64)
    indices = np.array([state.num_output for state in states], np.uint64)
    sharpness = (1 / temperature).astype(np.float32)
    numbers = uniform(seeds, indices)
    return Draws(rows, peaks, sharpness, top_k.astype(np.intp), top_p, min_p, typical_p, numbers)


def draw(logits: FloatArray, draws: Draws) -> Ids:
    """Draw token ids [n] from the softmax of `logits[draws.rows]` at each row's temperature, after its filters."""
    token_ids = np.empty(len(draws.rows), np.intp)
    is_filtered = draws.is_filtered(logits.shape[1])
    for mask, draw_rows in ((is_filtered, _draw_filtered), (~is_filtered, _draw_unfiltered)):
        if mask.any():
            token_ids[mask] = draw_rows(logits, draws.select(mask))
    return token_ids


def _draw_unfiltered(logits: FloatArray, draws: Draws) -> Ids:
    sums = chunk_sums(logits, draws.rows, draws.peaks, draws.sharpness)
    return invert_chunks(sums, draws.uniform, lambda chunk: _chunk_weights(logits, draws, chunk))


def _chunk_weights(logits: FloatArray, draws: Draws, chunk: Ids) -> FloatArray:
    """Return the weights [n, CHUNK] of the tokens of each row's `chunk`, 0 past the vocabulary's end."""
    token_ids = chunk[:, None] * CHUNK + np.arange(CHUNK)
    values = logits[draws.rows[:, None], np.minimum(token_ids, logits.shape[1] - 1)]
    values[token_ids >= logits.shape[1]] = -np.inf
    return weigh(values, draws.peaks, draws.sharpness)


def _draw_filtered(logits: FloatArray, draws: Draws) -> Ids:
    token_ids = draw_from_top_tokens(logits, draws, *_totals_and_means(logits, draws))
    left = np.flatnonzero(token_ids == UNKNOWN)
    token_ids[left] = draw_from_all_tokens(logits, draws.select(left))
    return token_ids


def _totals_and_means(logits: FloatArray, draws: Draws) -> tuple[Doubles, Doubles]:
    """Return sum [n] and expected logarithm [n] of the weights of all tokens, NaN for rows that need neither."""
    totals, means = np.full((2, len(draws.rows)), np.nan)
    mask = draws.needs_total(logits.shape[1])
    if mask.any():
        part = draws.select(mask)
        totals[mask] = sum_weights(logits, part.rows, part.peaks, part.sharpness)
    mask = draws.needs_mean(logits.shape[1])
    if mask.any():
        part = draws.select(mask)
        totals[mask], means[mask] = sum_weights_and_means(logits, part.rows, part.peaks, part.sharpness)
    return totals, means


# -- from the top tokens of all rows at once


def draw_from_top_tokens(logits: FloatArray, draws: Draws, totals: Doubles, means: Doubles) -> Ids:
    """Return token ids [n]; UNKNOWN for rows that the top tokens do not decide. `totals` and `means` [n] are of the
    weights of all tokens, read where `draws.needs_total` or `draws.needs_mean`."""
    top = top_tokens(logits, draws.rows)
    num_rows, width = top.values.shape
    chunks = np.zeros((num_rows, -(-width // CHUNK), CHUNK), np.float32)
    weights = weigh(top.values, draws.peaks, draws.sharpness, out=chunks.reshape(num_rows, -1)[:, :width])
    # No token outside the top weighs more than this. If it is 0, none outside weighs anything.
    bound = weigh(top.bound[:, None], draws.peaks, draws.sharpness)[:, 0]
    least, is_cut = _least_kept_of_top(weights, bound, draws, logits.shape[1], totals)
    is_known = is_cut & ((least > bound) | (bound == 0))
    weights *= (weights >= least[:, None]) & (weights > bound[:, None])
    typical = np.flatnonzero(is_cut & (draws.typical_p < 1))
    if len(typical):
        part, is_all = draws.select(typical), draws.needs_mean(logits.shape[1])[typical]
        kept = _keep_typical_of_top(weights[typical], bound[typical], part, is_all, totals[typical], means[typical])
        weights[typical], is_settled = kept
        is_known[typical] |= is_settled
    index = np.arange(num_rows)
    places = invert_chunks(chunks.sum(axis=2), draws.uniform, lambda chunk: chunks[index, chunk])
    return np.where(is_known, top.token_ids[index, np.minimum(places, width - 1)], UNKNOWN)


def _least_kept_of_top(
    weights: FloatArray, bound: FloatArray, draws: Draws, vocab_size: int, totals: Doubles
) -> tuple[FloatArray, Mask]:
    """Return the least weight [n] that top_k, top_p and min_p keep; it is not above the bound if it is unknown. The
    mask says whether top_k, on which top_p depends, is known or off."""
    descending = np.sort(weights, axis=1)[:, ::-1]
    width = max(int(np.count_nonzero(descending > bound[:, None], axis=1).max()), 1)
    descending = descending[:, :width]
    cumulative = np.cumsum(descending, axis=1, dtype=np.float64)
    has_top_k = draws.top_k < vocab_size
    least_of_top_k = np.where(has_top_k, _at(descending, draws.top_k - 1), 0)
    num_kept = np.count_nonzero(descending >= least_of_top_k[:, None], axis=1)
    mass = np.where(has_top_k, cumulative[np.arange(len(cumulative)), num_kept - 1], totals)
    # The token that crosses top_p is kept, because the set must contain at least that much.
    crossing = np.count_nonzero(cumulative < (draws.top_p * mass)[:, None], axis=1)
    least_of_top_p = np.where(draws.top_p < 1, _at(descending, crossing), 0)
    least = np.maximum(np.maximum(least_of_top_k, least_of_top_p), draws.min_p.astype(np.float32))
    return least, ~has_top_k | (least_of_top_k > bound) | (bound == 0)


def _keep_typical_of_top(
    weights: FloatArray, bound: FloatArray, draws: Draws, is_all: Mask, totals: Doubles, means: Doubles
) -> tuple[FloatArray, Mask]:
    """Return the weights [n, width] that typical_p keeps, and whether the tokens outside the top cannot change them.
    `is_all` says whether typical_p chooses among all tokens, else among those that other filters left."""
    mass = np.where(is_all, totals, weights.sum(axis=1, dtype=np.float64))
    mean = np.where(is_all, means, mean_log_weight(weights, mass))
    kept, farthest = keep_typical(weights, draws.typical_p * mass, mean)
    # A token outside the top is less likely than the bound: farther off than it, if the bound is past the mean.
    is_settled: Mask = is_all & (farthest < mean - np.log(np.maximum(bound, np.finfo(np.float32).tiny)))
    return kept, is_settled


def _at(descending: FloatArray, places: Ids) -> FloatArray:
    """Return the elements at `places` [n], 0 past the end."""
    width = descending.shape[1]
    found: FloatArray = descending[np.arange(len(places)), np.minimum(places, width - 1)]
    return np.where(places < width, found, np.float32(0))


# -- from all tokens of one row at a time: exact for any distribution, however flat


def draw_from_all_tokens(logits: FloatArray, draws: Draws) -> Ids:
    num_chunks = -(-logits.shape[1] // CHUNK)
    weights = np.zeros((1, num_chunks * CHUNK), np.float32)
    token_ids = np.empty(len(draws.rows), np.intp)
    for index in range(len(token_ids)):
        token_ids[index] = _draw_from_row(logits, draws.select(slice(index, index + 1)), weights)[0]
    return token_ids


def _draw_from_row(logits: FloatArray, draw: Draws, buffer: FloatArray) -> Ids:
    """Return the token id [1] of the only row of `draw`. `buffer` [1, whole chunks] is 0 past the vocabulary's end."""
    row = int(draw.rows[0])
    weights = weigh(logits[row : row + 1], draw.peaks, draw.sharpness, out=buffer[:, : logits.shape[1]])
    # Multiplying by a mask takes a tenth of the time of setting by one that has no pattern.
    weights *= weights >= _least_kept(weights[0], draw)
    if draw.typical_p[0] < 1:
        mass = weights.sum(axis=1, dtype=np.float64)
        weights[:] = keep_typical(weights, draw.typical_p * mass, mean_log_weight(weights, mass))[0]
    sums = np.empty((1, buffer.shape[1] // CHUNK), np.float32)
    sum_chunks(buffer, sums)
    return invert_chunks(sums, draw.uniform, lambda chunk: buffer.reshape(-1, CHUNK)[chunk])


def _least_kept(weights: FloatArray, draw: Draws) -> np.float32:
    """Return the least of `weights` [vocab_size] that top_k, top_p and min_p keep."""
    top_k, top_p = int(draw.top_k[0]), float(draw.top_p[0])
    least = np.float32(draw.min_p[0])
    if top_k < len(weights):
        least_of_top_k = np.partition(weights, -top_k)[-top_k]
        least = max(least, least_of_top_k)
        weights = weights[np.flatnonzero(weights >= least_of_top_k)]
    if top_p < 1:
        least = max(least, _least_of_nucleus(weights, top_p))
    return least


def _least_of_nucleus(weights: FloatArray, top_p: float) -> np.float32:
    """Return the weight of the token that crosses `top_p`. It is kept: the set must contain at least that much."""
    target = top_p * _sum(weights)
    before, weights = _narrow_down(weights, target, top_p) if len(weights) > _FEW else (0.0, weights)
    if not len(weights):  # rounding put the crossing behind the last token with a weight
        return np.float32(0)
    descending = np.sort(weights)[::-1]
    crossing = np.cumsum(descending, dtype=np.float64).searchsorted(target - before)
    return np.float32(descending[min(int(crossing), len(descending) - 1)])


def _narrow_down(weights: FloatArray, target: float, top_p: float) -> tuple[float, FloatArray]:
    """Return the weights among which, in descending order, the sum reaches `target`, and the sum of all larger ones. A
    sample tells between which two weights that is likely to be. The result is right wherever it is."""
    sample = np.sort(weights[::_STEP])[::-1]
    cumulative = np.cumsum(sample, dtype=np.float64)
    shares = np.array([top_p - _MARGIN * (1 - top_p), top_p + _MARGIN * (1 - top_p)])
    upper, lower = sample[np.minimum(cumulative.searchsorted(shares * cumulative[-1]), len(sample) - 1)]
    is_above = weights > upper
    above = _sum(weights * is_above)
    if above >= target:
        return 0.0, weights[np.flatnonzero(is_above)]
    middle = weights[np.flatnonzero((weights > lower) & ~is_above)]
    up_to_lower = above + _sum(middle)
    if up_to_lower >= target:
        return above, middle
    # All weights below this together are less than what is cut off.
    negligible = (1 - top_p) * target / top_p / len(weights)
    return up_to_lower, weights[np.flatnonzero((weights <= lower) & (weights >= negligible))]


def _sum(weights: FloatArray) -> float:
    """Sum in chunks, with the same rounding as everywhere."""
    whole = len(weights) // CHUNK * CHUNK
    sums = np.empty((1, whole // CHUNK), np.float32)
    sum_chunks(weights[None, :whole], sums)
    return float(sums.sum(dtype=np.float64) + weights[whole:].sum(dtype=np.float64))


# -- locally typical sampling (Meister et al. 2022, arXiv 2202.00666), as in transformers' TypicalLogitsWarper
#
# It keeps the tokens whose surprise, -log(probability), is nearest to the entropy, until they have `typical_p`. With s
# for the scaled logit, the logarithm of the weight, surprise is log(mass) - s and entropy log(mass) - mean(s): their
# distance is |s - mean(s)|.


def mean_log_weight(weights: FloatArray, mass: Doubles) -> Doubles:
    """Return the expected logarithm [n] of the weights [n, width], whose sum is `mass`."""
    mean: Doubles = (weights * _logarithm(weights)).sum(axis=1, dtype=np.float64) / mass
    return mean


def keep_typical(weights: FloatArray, target: Doubles, mean: Doubles) -> tuple[FloatArray, FloatArray]:
    """Return the weights [n, width] nearest to `mean` that sum to `target`, else 0, and the largest distance [n]."""
    distance = np.abs(_logarithm(weights) - mean[:, None].astype(np.float32))
    order = np.argsort(distance, axis=1)
    cumulative = np.cumsum(np.take_along_axis(weights, order, axis=1), axis=1, dtype=np.float64)
    last = np.minimum(np.count_nonzero(cumulative < target[:, None], axis=1), weights.shape[1] - 1)
    rows = np.arange(len(order))
    farthest: FloatArray = distance[rows, order[rows, last]]
    return weights * (distance <= farthest[:, None]), farthest


def _logarithm(weights: FloatArray) -> FloatArray:
    """Return the logarithm, finite for a weight of 0 too, so that their product is 0."""
    logarithm: FloatArray = np.log(np.maximum(weights, np.finfo(np.float32).tiny))
    return logarithm


# -- random numbers
#
# They are a pure function of a seed and the index of the output token. No state is carried from token to token, so a
# sequence that is preempted, resumed in another engine or verified out of turn draws the same numbers.

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
