"""A plain reference of filters and draw in float64, one token at a time."""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from sluice.engine.types import SamplingParams

Probabilities = NDArray[np.float64]

_NEAR = 5e-6
"""Distances from the mean surprise that differ by less may be equal, or the other way round, in float32."""


def probabilities(
    logits: NDArray[np.float32], params: SamplingParams, mean_error: float = 0.0, tie: float = 0.0
) -> Probabilities:
    """Return the distribution [vocab_size] after transformers' warpers. typical_p measures distances from the mean
    surprise, which is off by `mean_error`, and takes those as equal that differ by no more than `tie`."""
    p = _softmax(logits.astype(np.float64) / params.temperature)
    if params.top_k:
        p = _keep(p, p >= np.sort(p)[::-1][min(params.top_k, len(p)) - 1])
    if params.top_p < 1:
        descending = np.sort(p)[::-1]
        crossing = int(np.searchsorted(np.cumsum(descending), params.top_p))
        p = _keep(p, p >= descending[min(crossing, len(p) - 1)])
    if params.min_p:
        p = _keep(p, p >= params.min_p * p.max())
    if params.typical_p < 1:
        p = _typical(p, params.typical_p, mean_error, tie)
    return p


def _typical(p: Probabilities, typical_p: float, mean_error: float, tie: float) -> Probabilities:
    surprise = np.where(p > 0, -np.log(np.maximum(p, 1e-300)), np.inf)
    entropy = float(p[p > 0] @ surprise[p > 0])
    distance = np.abs(surprise - entropy - mean_error)
    order = np.argsort(distance, kind="stable")
    last = int((np.cumsum(p[order]) < typical_p).sum())
    return _keep(p, distance <= distance[order[min(last, len(p) - 1)]] + tie)


def _softmax(scaled: Probabilities) -> Probabilities:
    weights: Probabilities = np.exp(scaled - scaled.max())
    shares: Probabilities = weights / weights.sum()
    return shares


def _keep(p: Probabilities, mask: NDArray[np.bool_]) -> Probabilities:
    kept = np.where(mask, p, 0)
    shares: Probabilities = kept / kept.sum()
    return shares


def may_draw(token_id: int, logits: NDArray[np.float32], params: SamplingParams, uniform: float) -> bool:
    """Say whether `uniform` draws the token, perhaps as float32 rounds."""
    return token_id in _drawn(logits, params, uniform)


def tokens_possible(logits: NDArray[np.float32], params: SamplingParams, uniform: float) -> set[int]:
    """Return the token that `uniform` draws, and those it draws if float32 rounds the other way."""
    return set(_drawn(logits, params, uniform))


def _drawn(logits: NDArray[np.float32], params: SamplingParams, uniform: float) -> Iterator[int]:
    """Yield the token of exact numbers first: it is nearly always the one."""
    errors = ((0.0, 0.0), (-_NEAR, 0.0), (_NEAR, 0.0), (0.0, _NEAR)) if params.typical_p < 1 else ((0.0, 0.0),)
    for shift in (0.0, -2e-5, 2e-5):
        top_p, typical_p = (value + shift if value < 1 else value for value in (params.top_p, params.typical_p))
        shifted = _replace(params, top_p=top_p, typical_p=typical_p, min_p=params.min_p * (1 + shift))
        for mean_error, tie in errors:
            held = np.cumsum(probabilities(logits, shifted, mean_error, tie))
            for nudge in (0.0, -2e-5, 2e-5):
                yield int(np.searchsorted(held, min(max(uniform + nudge, 0.0), held[-1] * (1 - 1e-12)), "right"))


def _replace(params: SamplingParams, **fields: float) -> SamplingParams:
    kept = {name: getattr(params, name) for name in params.__struct_fields__}
    return SamplingParams(**{**kept, **fields})
