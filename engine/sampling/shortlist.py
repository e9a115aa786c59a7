"""Filters and draw for all rows at once by the likeliest tokens of each, which is enough for most distributions."""

import numpy as np

from engine.runners.base import FloatArray
from engine.sampling.candidates import shortlist
from engine.sampling.draws import Draws, Mask
from engine.sampling.inversion import CHUNK, Counts, Numbers, invert_chunks
from engine.sampling.softmax import weigh
from engine.sampling.typical import keep_typical, mean_of

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
