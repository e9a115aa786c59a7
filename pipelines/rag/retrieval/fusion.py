"""Several rankings of the same chunks made one, by reciprocal rank fusion (Cormack, Clarke and Büttcher, 2009)."""

from collections.abc import Sequence
from dataclasses import replace

from pipelines.rag.types import Hit, Vector

Key = tuple[str, int]


def fused(rankings: Sequence[Sequence[Hit]], weights: Sequence[float], k: int) -> list[Hit]:
    """Every chunk of the rankings once, best first; its score is the sum of weight / (k + place), places from 1.

    Only places count, since a cosine and BM25's sum have no common scale. Equal scores stand as they come in the
    earlier ranking. A chunk keeps its similarity and its vector whichever ranking has them.
    """
    scores: dict[Key, float] = {}
    hits: dict[Key, Hit] = {}
    for ranking, weight in zip(rankings, weights, strict=True):
        for place, hit in enumerate(ranking, 1):
            scores[hit.key] = scores.get(hit.key, 0.0) + weight / (k + place)
            before = hits.get(hit.key)
            hits[hit.key] = hit if before is None else _both(before, hit)
    ordered = sorted(hits, key=scores.__getitem__, reverse=True)
    return [replace(hits[key], score=scores[key]) for key in ordered]


def with_similarity(hits: Sequence[Hit], vector: Vector | None) -> list[Hit]:
    """The hits with the cosine to `vector` worked out where it is not known and their own vector is."""
    if vector is None:
        return list(hits)
    return [_compared(hit, vector) for hit in hits]


def _both(one: Hit, other: Hit) -> Hit:
    similarity = one.similarity if one.similarity is not None else other.similarity
    return replace(one, similarity=similarity, vector=one.vector if one.vector is not None else other.vector)


def _compared(hit: Hit, vector: Vector) -> Hit:
    if hit.similarity is not None or hit.vector is None:
        return hit
    return replace(hit, similarity=float(hit.vector @ vector))
