"""Short builders for the hits of a store."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from sluice.pipelines.encoding import Vector
from sluice.pipelines.rag.types import Hit


def hit(
    document: str, score: float = 1.0, *, index: int = 0, text: str = "", vector: Sequence[float] | None = None
) -> Hit:
    """Build a hit of the chunk `index` of `document`, whose characters no other chunk has."""
    return Hit(
        document_id=document,
        chunk_index=index,
        title=document.title(),
        heading="",
        start=index * 1000,
        end=index * 1000 + 900,
        text=text or f"{document} {index}",
        score=score,
        vector=None if vector is None else unit(vector),
    )


def near(document: str, similarity: float, *, index: int = 0, vector: Sequence[float] | None = None) -> Hit:
    """Build a hit of a search by vector."""
    return replace(hit(document, similarity, index=index, vector=vector), similarity=similarity)


def unit(values: Sequence[float]) -> Vector:
    vector = np.asarray(values, np.float32)
    return np.asarray(vector / np.linalg.norm(vector), np.float32)


def names(hits: Sequence[Hit]) -> list[str]:
    return [each.document_id for each in hits]
