"""Log probabilities under the model's own distribution: before penalties, temperature and filters."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from engine.runners.base import FloatArray
from engine.sampling.softmax import Candidates, Rows, likeliest, shortlist, totals, whole
from engine.types import TokenLogprob

_Ids = NDArray[np.intp]


def prompt_logprobs(logits: FloatArray, token_ids: NDArray[np.integer], num_top: int) -> list[TokenLogprob]:
    """Of each token of `token_ids` [n], given the logits [n, vocab_size] of the tokens before it."""
    return token_logprobs(logits, np.arange(len(logits)), token_ids, [num_top] * len(logits))


def token_logprobs(
    logits: FloatArray, rows: Rows, token_ids: NDArray[np.integer], num_top: Sequence[int]
) -> list[TokenLogprob]:
    """Of `token_ids` [n] in `rows` [n] of the logits, each with the `num_top` [n] likeliest beside it."""
    if not len(rows):
        return []
    log_mass = _log_mass(logits, rows)
    own = (logits[rows, token_ids] - log_mass).tolist()
    best = _largest(logits, rows, min(max(num_top), logits.shape[1]))
    values = (logits[rows[:, None], best] - log_mass[:, None]).tolist()
    return [
        TokenLogprob(token_id, logprob, list(zip(ids[:count], of_ids[:count], strict=True)))
        for token_id, logprob, ids, of_ids, count in zip(
            token_ids.tolist(), own, best.tolist(), values, num_top, strict=True
        )
    ]


def _log_mass(logits: FloatArray, rows: Rows) -> NDArray[np.float64]:
    """Log of the sum of the exponentials [n]."""
    peaks: FloatArray = logits[rows, likeliest(logits, rows)]
    mass = totals(logits, rows, peaks, np.ones(len(rows), np.float32))
    log_mass: NDArray[np.float64] = np.log(mass) + peaks
    return log_mass


def _largest(logits: FloatArray, rows: Rows, count: int) -> _Ids:
    """The ids [n, count] of the largest logits, largest first, smaller ids first among equal ones."""
    if count == 0:
        return np.empty((len(rows), 0), np.intp)
    candidates = shortlist(logits, rows)
    token_ids, least = _first(candidates, count)
    left = np.flatnonzero((least <= candidates.bound) & ~np.isneginf(candidates.bound))
    for row in left:  # more ties at the border than the shortlist holds
        token_ids[row] = _first(whole(logits, rows[[row]]), count)[0]
    return token_ids


def _first(candidates: Candidates, count: int) -> tuple[_Ids, FloatArray]:
    """The ids [n, count] of the first candidates in order, and the logit of the last of these."""
    order = _descending(candidates.values, count)
    least: FloatArray = candidates.values[np.arange(len(order)), order[:, -1]]
    return np.take_along_axis(candidates.token_ids, order, axis=1), least


def _descending(values: FloatArray, count: int) -> _Ids:
    """Places [n, count] of the largest of `values` [n, width], in order; the earlier place first among equal ones.

    Value and place are packed into one integer: sorting those takes a fraction of what an argsort does.
    """
    bits = (values + np.float32(0)).view(np.uint32)  # adding 0 makes 0 of -0
    is_negative = bits >> np.uint32(31) != 0
    falling = np.where(is_negative, bits, ~bits & np.uint32(2**31 - 1)).astype(np.uint64)
    keys = falling << np.uint64(32) | np.arange(values.shape[1], dtype=np.uint64)
    keys.sort(axis=1)
    return (keys[:, :count] & np.uint64(2**32 - 1)).astype(np.intp)
