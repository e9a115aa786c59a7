"""Maximal marginal relevance (Carbonell and Goldstein, 1998): relevant chunks that do not say the same again."""

from collections.abc import Sequence

import numpy as np

from pipelines.rag.types import Hit, Vectors


def diversified(hits: Sequence[Hit], limit: int, trade_off: float) -> list[Hit]:
    """At most `limit` of the hits, in the order in which they are chosen.

    Each time the one is taken for which `trade_off` * relevance - (1 - `trade_off`) * similarity to the nearest chosen
    one is highest, the earlier one where several are. Relevance is the score, moved to 0 to 1, as cosines are, so that
    it means the same after fusion and after a reranker. A chunk without a vector is like no other.
    """
    if not hits or limit <= 0:
        return []
    vectors = _vectors(hits)
    relevance = _moved_to_unit(np.array([hit.score for hit in hits], np.float64))
    nearest = np.zeros(len(hits))
    is_open = np.ones(len(hits), np.bool_)
    chosen: list[int] = []
    while len(chosen) < min(limit, len(hits)):
        gains = trade_off * relevance - (1.0 - trade_off) * nearest if chosen else relevance
        best = int(np.argmax(np.where(is_open, gains, -np.inf)))
        chosen.append(best)
        is_open[best] = False
        nearest = np.maximum(nearest, vectors @ vectors[best])
    return [hits[index] for index in chosen]


def _moved_to_unit(
    scores: np.ndarray[tuple[int], np.dtype[np.float64]],
) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    low, high = scores.min(), scores.max()
    return (scores - low) / (high - low) if high > low else np.ones_like(scores)


def _vectors(hits: Sequence[Hit]) -> Vectors:
    """A row for each hit, of zeros for one without."""
    dim = next((len(hit.vector) for hit in hits if hit.vector is not None), 1)
    rows = np.zeros((len(hits), dim), np.float32)
    for row, hit in zip(rows, hits, strict=True):
        if hit.vector is not None:
            row[:] = hit.vector
    return rows
