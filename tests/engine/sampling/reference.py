"""A plain reference of filters and draw in float64, one token at a time."""

import numpy as np
from numpy.typing import NDArray

from engine.types import SamplingParams

Probabilities = NDArray[np.float64]


def probabilities(logits: NDArray[np.float32], params: SamplingParams) -> Probabilities:
    """Return the distribution [vocab_size] after transformers' warpers."""
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
        p = _typical(p, params.typical_p)
    return p


def _typical(p: Probabilities, typical_p: float) -> Probabilities:
    surprise = np.where(p > 0, -np.log(np.maximum(p, 1e-300)), np.inf)
    entropy = float(sum(a * b for a, b in zip(p, surprise, strict=True) if a > 0))
    distance = np.abs(surprise - entropy)
    order = np.argsort(distance, kind="stable")
    last = int((np.cumsum(p[order]) < typical_p).sum())
    return _keep(p, distance <= distance[order[min(last, len(p) - 1)]])


def _softmax(scaled: Probabilities) -> Probabilities:
    weights: Probabilities = np.exp(scaled - scaled.max())
    shares: Probabilities = weights / weights.sum()
    return shares


def _keep(p: Probabilities, mask: NDArray[np.bool_]) -> Probabilities:
    kept = np.where(mask, p, 0)
    shares: Probabilities = kept / kept.sum()
    return shares


def tokens_possible(logits: NDArray[np.float32], params: SamplingParams, uniform: float) -> set[int]:
    """Return the token that `uniform` draws, and those it draws if float32 rounds the other way."""
    found = set()
    for shift in (-2e-5, 0.0, 2e-5):
        top_p, typical_p = (value + shift if value < 1 else value for value in (params.top_p, params.typical_p))
        shifted = _replace(params, top_p=top_p, typical_p=typical_p, min_p=params.min_p * (1 + shift))
        held = np.cumsum(probabilities(logits, shifted))
        for nudge in (-2e-5, 0.0, 2e-5):
            found.add(int(np.searchsorted(held, min(max(uniform + nudge, 0.0), held[-1] * (1 - 1e-12)), "right")))
    return found


def _replace(params: SamplingParams, **fields: float) -> SamplingParams:
    kept = {name: getattr(params, name) for name in params.__struct_fields__}
    return SamplingParams(**{**kept, **fields})
