"""Log probabilities under the model's own distribution, before penalties, temperature and filters."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from sluice.engine.arrays import FloatArray, Ids, Rows
from sluice.engine.runners.base import Statistic
from sluice.engine.sampling.cores import ONE_CORE, Cores
from sluice.engine.sampling.scan import Scan, scan
from sluice.engine.sampling.top_tokens import TopTokens, all_tokens, top_tokens
from sluice.engine.types import TokenLogprob

_Floats = NDArray[np.floating]

_LEAST_STRIPES = 32
"""Stripes that are searched for the likeliest tokens, or one for each token if these are more."""


def token_logprobs(
    logits: FloatArray, rows: Rows, token_ids: NDArray[np.integer], num_top: Sequence[int], cores: Cores = ONE_CORE
) -> list[TokenLogprob]:
    """Return the log probabilities of `token_ids` [n] in `rows` [n], each with the `num_top` [n] most likely tokens."""
    if not len(rows):
        return []
    found = scan(logits, rows, np.ones(len(rows), np.float32), Statistic.TOTAL, cores)
    log_mass = np.log(found.totals) + found.peaks
    own = logits[rows, token_ids] - log_mass
    best = _largest(logits, rows, found, min(max(num_top), logits.shape[1]))
    return list_logprobs(token_ids, own, best, logits[rows[:, None], best] - log_mass[:, None], num_top)


def list_logprobs(
    token_ids: NDArray[np.integer], own: _Floats, best: Ids, values: _Floats, num_top: Sequence[int]
) -> list[TokenLogprob]:
    """Make the entry of each of `token_ids` [n]: its log probability, of `own` [n], and the first `num_top[i]` of the
    tokens `best` [n, any] with their log probabilities, `values` [n, any]."""
    return [
        TokenLogprob(token_id, logprob, list(zip(top_ids[:count], top_values[:count], strict=True)))
        for token_id, logprob, top_ids, top_values, count in zip(
            token_ids.tolist(), own.tolist(), best.tolist(), values.tolist(), num_top, strict=True
        )
    ]


def _largest(logits: FloatArray, rows: Rows, found: Scan, count: int) -> Ids:
    """Return the ids [n, count] of the largest logits, largest first, smaller ids first among equal ones."""
    if count == 0:
        return np.empty((len(rows), 0), np.intp)
    top = top_tokens(logits, rows, found.maxima, found.coarse, max(count, _LEAST_STRIPES))
    token_ids, least = _first(top, count)
    left = np.flatnonzero((least <= top.bound) & ~np.isneginf(top.bound))
    for row in left:  # more ties at the bound than the top tokens include
        token_ids[row] = _first(all_tokens(logits, rows[[row]]), count)[0]
    return token_ids


def _first(top: TopTokens, count: int) -> tuple[Ids, FloatArray]:
    """Return the ids [n, count] of the largest of `top`, in order, and the logit [n] of the last of these."""
    order = _descending(top.values, count)
    least: FloatArray = top.values[np.arange(len(order)), order[:, -1]]
    return np.take_along_axis(top.token_ids, order, axis=1), least


def _descending(values: FloatArray, count: int) -> Ids:
    """Return the places [n, count] of the largest of `values` [n, width], in order; earlier places first among equals.
    Value and place are packed into one integer, because sorting those takes a fraction of the time of an argsort."""
    bits = (values + np.float32(0)).view(np.uint32)  # adding 0 makes 0 of -0
    is_negative = bits >> np.uint32(31) != 0
    falling = np.where(is_negative, bits, ~bits & np.uint32(2**31 - 1)).astype(np.uint64)
    keys = falling << np.uint64(32) | np.arange(values.shape[1], dtype=np.uint64)
    keys.sort(axis=1)
    return (keys[:, :count] & np.uint64(2**32 - 1)).astype(np.intp)
