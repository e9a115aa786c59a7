"""Which tokens remain candidates: top_k, top_p, min_p, each as the least weight to keep.

A weight is a token's probability over that of the likeliest one. A filter keeps every token that weighs at
least its threshold, so ties at the border all stay. Order as in transformers: top_k, then top_p of what is
left, then min_p.
"""

import numpy as np

from engine.runners.base import FloatArray
from engine.types import SamplingParams


def filter_weights(weights: FloatArray, params: list[SamplingParams]) -> None:
    """Set what the filters remove from `weights` [num_rows, vocab_size] to 0, in place."""
    for row, row_params in zip(weights, params, strict=True):
        threshold = _least_kept(row, row_params)
        if threshold > 0:
            row[row < threshold] = 0


def _least_kept(row: FloatArray, params: SamplingParams) -> float:
    """The smallest weight that all filters keep; 0 where they are off."""
    threshold = params.min_p
    if 0 < params.top_k < len(row):
        row = np.partition(row, len(row) - params.top_k)[len(row) - params.top_k :]
        threshold = max(threshold, float(row.min()))
    if params.top_p < 1:
        threshold = max(threshold, _least_of_nucleus(row, params.top_p))
    return threshold


def _least_of_nucleus(row: FloatArray, top_p: float) -> float:
    """The weight of the token that crosses `top_p`, which is kept: the set must hold at least that much."""
    total = float(row.sum(dtype=np.float64))
    # All tokens below this weight together hold less than 1 - top_p, so the nucleus ends before them:
    # exact, and it leaves little to sort.
    negligible = (1 - top_p) * total / len(row)
    candidates = np.sort(row[row >= negligible])[::-1]
    cumulative = np.cumsum(candidates, dtype=np.float64)
    crossing = int(np.searchsorted(cumulative, top_p * total))
    return float(candidates[min(crossing, len(candidates) - 1)])
