"""Draws one token for each row that samples at random.

The token is the one where the cumulative weight, in order of the ids, of the tokens that the filters keep passes the
share `uniform` of its sum. So it depends only on distribution, parameters and random number, whichever way it is found.
The filters, in transformers' order: top_k, top_p of the rest, min_p, typical_p of the rest. The first three keep each
token that weighs at least as much as the lightest that they keep, so all ties at the border stay.

typical_p is locally typical sampling (Meister et al. 2022, arXiv 2202.00666), as in transformers' TypicalLogitsWarper:
it keeps the tokens whose surprise, -log(probability), is nearest to the entropy, until they have `typical_p`. With s
for the scaled logit, the logarithm of the weight, surprise is log(mass) - s and entropy log(mass) - mean(s): their
distance is |s - mean(s)|.

Most distributions are decided by a few top tokens of all rows at once, some by a few more; what is left is drawn from
all tokens. numpy on all cores is fast enough: for 64 rows of 150,000 logits the sums of the exponentials take 3 ms,
while a TopK with ReduceLogSumExp inside the OpenVINO graph takes 26 to 29, sees logits rounded to bf16, and would have
to be written for every runtime.
"""

import numpy as np

from sluice.engine.arrays import Doubles, FloatArray, Ids, Mask
from sluice.engine.runners.base import Draws, Statistic
from sluice.engine.sampling.cores import Cores, row_blocks
from sluice.engine.sampling.many_tokens import draw_from_all_tokens
from sluice.engine.sampling.scan import Scan, scan, scan_chunks
from sluice.engine.sampling.softmax import CHUNK, invert_chunks, logarithm, num_below, sum_chunks, weigh
from sluice.engine.sampling.top_tokens import TopTokens, all_tokens, top_tokens

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
        part, is_all = draws.select(typical), draws.wanted[typical] == Statistic.MEAN
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


_FEWEST_STRIPES, _MOST_STRIPES = 32, 128
"""Stripes that are searched first, and for the rows that these do not decide."""

_SMALL_VOCABULARY = 2**15
"""Rows of so few tokens are sorted as a whole, many at once, rather than narrowed down one by one."""


def draw(logits: FloatArray, draws: Draws, cores: Cores) -> tuple[Ids, FloatArray]:
    """Draw token ids [n] from the softmax of `logits[draws.rows]` at each row's temperature, after its filters. Returns
    also the largest logits [n]; a row where that is not finite has no meaningful token."""
    first = int(draws.wanted[0])
    if (draws.wanted == first).all():
        return _draw_alike(logits, draws, Statistic(first), cores)
    token_ids, peaks = np.empty(len(draws.rows), np.intp), np.empty(len(draws.rows), np.float32)
    for wanted in Statistic:
        mask = draws.wanted == wanted
        if mask.any():
            token_ids[mask], peaks[mask] = _draw_alike(logits, draws.select(mask), wanted, cores)
    return token_ids, peaks


def _draw_alike(logits: FloatArray, draws: Draws, wanted: Statistic, cores: Cores) -> tuple[Ids, FloatArray]:
    """Draw for rows that need the same of all tokens."""
    if wanted is Statistic.CHUNKS:
        return _draw_unfiltered(logits, draws, cores)
    found = scan(logits, draws.rows, draws.sharpness, wanted, cores)
    is_finite = np.isfinite(found.peaks)
    if is_finite.all():
        return _draw_filtered(logits, draws, found, cores), found.peaks
    token_ids = np.full(len(draws.rows), UNKNOWN, np.intp)
    if is_finite.any():
        token_ids[is_finite] = _draw_filtered(logits, draws.select(is_finite), found.select(is_finite), cores)
    return token_ids, found.peaks


def _draw_unfiltered(logits: FloatArray, draws: Draws, cores: Cores) -> tuple[Ids, FloatArray]:
    peaks, sums = scan_chunks(logits, draws.rows, draws.sharpness, cores)
    sums[~np.isfinite(peaks)] = 1  # any token will do
    return invert_chunks(sums, draws.uniform, lambda chunk: _chunk_weights(logits, draws, peaks, chunk)), peaks


def _chunk_weights(logits: FloatArray, draws: Draws, peaks: FloatArray, chunk: Ids) -> FloatArray:
    """Return the weights [n, CHUNK] of the tokens of each row's `chunk`, 0 past the vocabulary's end."""
    token_ids = chunk[:, None] * CHUNK + np.arange(CHUNK)
    values = logits[draws.rows[:, None], np.minimum(token_ids, logits.shape[1] - 1)]
    values[token_ids >= logits.shape[1]] = -np.inf
    return weigh(values, peaks, draws.sharpness)


def _draw_filtered(logits: FloatArray, draws: Draws, found: Scan, cores: Cores) -> Ids:
    vocab_size = logits.shape[1]
    token_ids = np.full(len(draws.rows), UNKNOWN, np.intp)
    least_kept = draws.top_p * found.totals
    """No token weighs more than 1, so that top_p keeps at least so many. With more than there are stripes to search,
    these are not likely to have all. NaN where top_p is not the first filter."""
    for num_stripes in _stripes_to_try(draws):
        left = np.flatnonzero((token_ids == UNKNOWN) & ~(least_kept > num_stripes))
        if len(left):
            draws_left, found_left = _select(draws, found, left)
            top = top_tokens(logits, draws_left.rows, found_left.maxima, found_left.coarse, num_stripes)
            token_ids[left] = draw_from_top_tokens(top, draws_left, found_left)
    left = np.flatnonzero(token_ids == UNKNOWN)
    if len(left):
        draw_rest = _draw_sorting if vocab_size <= _SMALL_VOCABULARY else draw_from_all_tokens
        token_ids[left] = draw_rest(logits, *_select(draws, found, left), cores)
    return token_ids


def _select(draws: Draws, found: Scan, left: Ids) -> tuple[Draws, Scan]:
    return (draws, found) if len(left) == len(draws.rows) else (draws.select(left), found.select(left))


def _stripes_to_try(draws: Draws) -> list[int]:
    """Return how many stripes to search for the tokens that decide, fewest first. As many as top_k find its tokens."""
    most_top_k = int(draws.top_k[draws.top_k < _MOST_STRIPES].max(initial=0))
    fewest = next(size for size in (_FEWEST_STRIPES, 2 * _FEWEST_STRIPES, _MOST_STRIPES) if size > most_top_k)
    return [fewest] if fewest == _MOST_STRIPES else [fewest, _MOST_STRIPES]


def _draw_sorting(logits: FloatArray, draws: Draws, found: Scan, cores: Cores) -> Ids:
    """Draw from all tokens of a small vocabulary."""
    token_ids = np.empty(len(draws.rows), np.intp)

    def work(which: slice) -> None:
        top = all_tokens(logits, draws.rows[which])
        token_ids[which] = draw_from_top_tokens(top, draws.select(which), found.select(which))

    cores.share(row_blocks(len(token_ids), logits.shape[1]), len(token_ids) * logits.shape[1], lambda: work)
    return token_ids
