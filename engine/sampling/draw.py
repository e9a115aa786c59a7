"""Draws one token for each row that samples at random.

The token is the one where the cumulative weight, in order of the ids, of the tokens that the filters keep passes the
share `uniform` of its sum. So it depends only on distribution, parameters and random number, whichever way it is found.
The filters, in transformers' order: top_k, top_p of the rest, min_p, typical_p of the rest. The first three keep each
token that weighs at least as much as the lightest that they keep, so all ties at the border stay.

Most distributions are decided by a few top tokens of all rows at once, some by a few more; what is left is drawn from
all tokens. numpy on all cores is fast enough: for 64 rows of 150,000 logits the sums of the exponentials take 3 ms,
while a TopK with ReduceLogSumExp inside the OpenVINO graph takes 26 to 29, sees logits rounded to bf16, and would have
to be written for every runtime.
"""

import numpy as np

from sluice.engine.arrays import FloatArray, Ids
from sluice.engine.runners.base import Draws, Wanted
from sluice.engine.sampling.cores import Cores, row_blocks
from sluice.engine.sampling.few_tokens import UNKNOWN, draw_from_top_tokens
from sluice.engine.sampling.many_tokens import draw_from_all_tokens
from sluice.engine.sampling.scan import Scan, scan, scan_chunks
from sluice.engine.sampling.softmax import CHUNK, invert_chunks, weigh
from sluice.engine.sampling.top_tokens import all_tokens, top_tokens

_FEWEST_STRIPES, _MOST_STRIPES = 32, 128
"""Stripes that are searched first, and for the rows that these do not decide."""

_SMALL_VOCABULARY = 2**15
"""Rows of so few tokens are sorted as a whole, many at once, rather than narrowed down one by one."""


def draw(logits: FloatArray, draws: Draws, cores: Cores) -> tuple[Ids, FloatArray]:
    """Draw token ids [n] from the softmax of `logits[draws.rows]` at each row's temperature, after its filters. Returns
    also the largest logits [n]; a row where that is not finite has no meaningful token."""
    first = int(draws.wanted[0])
    if (draws.wanted == first).all():
        return _draw_alike(logits, draws, Wanted(first), cores)
    token_ids, peaks = np.empty(len(draws.rows), np.intp), np.empty(len(draws.rows), np.float32)
    for wanted in Wanted:
        mask = draws.wanted == wanted
        if mask.any():
            token_ids[mask], peaks[mask] = _draw_alike(logits, draws.select(mask), wanted, cores)
    return token_ids, peaks


def _draw_alike(logits: FloatArray, draws: Draws, wanted: Wanted, cores: Cores) -> tuple[Ids, FloatArray]:
    """Draw for rows that need the same of all tokens."""
    if wanted is Wanted.CHUNKS:
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
