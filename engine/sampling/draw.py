"""One token for each row that draws at random.

The token is the one where the cumulative weight, in order of the ids, of what the filters keep passes the share
`uniform` of it. So it depends on nothing but distribution, parameters and random number, whichever way it is found.
The filters, in transformers' order: top_k, top_p of what is left, min_p, typical_p of what is left. The first three
keep whatever weighs at least as much as the least token that they keep, so ties at the border all stay.

Numpy alone is fast enough. At 64 rows of 150,000 logits the sum of the exponentials costs about 10 ms and the
likeliest tokens 5, where a TopK with ReduceLogSumExp inside the OpenVINO graph costs 26 to 29, sees logits rounded to
bf16, and would have to be written for every runtime.
"""

import numpy as np

from engine.runners.base import FloatArray
from engine.sampling.dense import draw_from_all
from engine.sampling.draws import Draws
from engine.sampling.inversion import CHUNK, Counts, Numbers, invert_chunks
from engine.sampling.shortlist import UNKNOWN, draw_from_shortlist
from engine.sampling.softmax import chunk_sums, totals, totals_and_means, weigh


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
