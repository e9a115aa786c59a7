"""Draws from the top tokens of many rows at once, where these decide."""

import numpy as np

from sluice.engine.arrays import Doubles, FloatArray, Ids, Mask
from sluice.engine.runners.base import Draws, Wanted
from sluice.engine.sampling.scan import Scan
from sluice.engine.sampling.softmax import CHUNK, invert_chunks, num_below, sum_chunks, weigh
from sluice.engine.sampling.top_tokens import TopTokens
from sluice.engine.sampling.typical import logarithm

UNKNOWN = -1
"""Stands for a token that the top tokens do not determine."""


def draw_from_top_tokens(top: TopTokens, draws: Draws, found: Scan) -> Ids:
    """Return token ids [n]; UNKNOWN for rows that the top tokens do not decide. `found` has what is `draws.wanted`."""
    num_rows, width = top.values.shape
    chunks = np.zeros((num_rows, -(-width // CHUNK), CHUNK), np.float32)
    padded = chunks.reshape(num_rows, -1)
    weights = weigh(top.values, found.peaks, draws.sharpness, out=padded[:, :width])
    # No token outside the top weighs more than this. If it is 0, none outside weighs anything.
    bound = weigh(top.bound[:, None], found.peaks, draws.sharpness)[:, 0]
    least, is_cut = _least_kept(padded, bound, draws, found.totals)
    is_known = is_cut & ((least > bound) | (bound == 0))
    weights *= (weights >= least[:, None]) & (weights > bound[:, None])
    typical = np.flatnonzero(is_cut & (draws.typical_p < 1))
    if len(typical):
        part, is_all = draws.select(typical), draws.wanted[typical] == Wanted.MEAN
        totals, means = found.totals[typical], found.means[typical]
        kept = _keep_typical(weights[typical], bound[typical], part, is_all, totals, means)
        weights[typical], is_settled = kept
        is_known[typical] |= is_settled
    index = np.arange(num_rows)
    places = invert_chunks(sum_chunks(padded), draws.uniform, lambda chunk: chunks[index, chunk])
    return np.where(is_known, top.token_ids[index, np.minimum(places, width - 1)], UNKNOWN)


def _least_kept(weights: FloatArray, bound: FloatArray, draws: Draws, totals: Doubles) -> tuple[FloatArray, Mask]:
    """Return the least weight [n] that top_k, top_p and min_p keep; it is not above the bound if it is unknown. The
    mask says whether top_k, on which top_p depends, is known or off. `weights` are [n, whole chunks]."""
    least, has_top_k = draws.min_p.astype(np.float32), draws.has_top_k
    has_top_p = draws.top_p < 1
    if not (has_top_k.any() or has_top_p.any()):
        return least, ~has_top_k
    ascending = np.sort(weights, axis=1)
    num_above = max(int(np.count_nonzero(ascending > bound[:, None], axis=1).max()), 1)
    descending = np.ascontiguousarray(ascending[:, : -num_above - 1 : -1])
    descending *= descending > bound[:, None]
    mass = totals
    least_of_top_k = np.zeros_like(least)
    if has_top_k.any():
        least_of_top_k = np.where(has_top_k, _at(descending, draws.top_k - 1), np.float32(0))
        kept = descending * (descending >= least_of_top_k[:, None])
        mass = np.where(has_top_k, kept.sum(axis=1, dtype=np.float64), totals)
    # The token that crosses top_p is kept, because the set must contain at least that much.
    crossing = num_below(descending, draws.top_p * mass)
    least_of_top_p = np.where(has_top_p, _at(descending, crossing), np.float32(0))
    least = np.maximum(np.maximum(least_of_top_k, least_of_top_p), least)
    return least, ~has_top_k | (least_of_top_k > bound) | (bound == 0)


def _keep_typical(
    weights: FloatArray, bound: FloatArray, draws: Draws, is_all: Mask, totals: Doubles, means: Doubles
) -> tuple[FloatArray, Mask]:
    """Return the weights [n, width] that typical_p keeps, and whether the tokens outside the top cannot change them.
    `is_all` says whether typical_p chooses among all tokens, else among those that other filters left."""
    mass = np.where(is_all, totals, weights.sum(axis=1, dtype=np.float64))
    mass[mass == 0] = 1  # more tokens are tied at the bound than are in the top: the row stays unsettled
    mean = np.where(is_all, means, (weights * logarithm(weights)).sum(axis=1, dtype=np.float64) / mass)
    distance = np.abs(logarithm(weights) - mean[:, None].astype(np.float32))
    order = np.argsort(distance, axis=1)
    cumulative = np.cumsum(np.take_along_axis(weights, order, axis=1), axis=1, dtype=np.float64)
    last = np.minimum(np.count_nonzero(cumulative < (draws.typical_p * mass)[:, None], axis=1), weights.shape[1] - 1)
    index = np.arange(len(order))
    farthest = distance[index, order[index, last]]
    # A token outside the top is less likely than the bound: farther off than it, if the bound is past the mean.
    is_settled: Mask = is_all & (farthest < mean - np.log(np.maximum(bound, np.finfo(np.float32).tiny)))
    return weights * (distance <= farthest[:, None]), is_settled


def _at(descending: FloatArray, places: Ids) -> FloatArray:
    """Return the elements at `places` [n], 0 past the end."""
    width = descending.shape[1]
    found: FloatArray = descending[np.arange(len(places)), np.minimum(places, width - 1)]
    return np.where(places < width, found, np.float32(0))
