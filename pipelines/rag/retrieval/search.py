"""One search: candidates from a store, fused, reranked, made diverse, cut."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from pipelines.rag.filters import Filter
from pipelines.rag.stores.base import Store
from pipelines.rag.types import Hit, RetrievalMode, Vector

MAX_TOP_K = 100


@dataclass(frozen=True, slots=True)
class SearchOptions:
    """How a search goes. `num_candidates` of each kind before fusion, or top_k where that is more.

    `min_similarity`: chunks less similar to the question that no word matches are not found at all; `mmr_lambda` None:
    no maximal marginal relevance, else 1 is relevance alone, 0 diversity alone. `rrf_k` is reciprocal rank fusion's.
    """

    mode: RetrievalMode = RetrievalMode.HYBRID
    top_k: int = 4
    num_candidates: int = 40
    rrf_k: int = 60
    min_similarity: float = 0.0
    mmr_lambda: float | None = None


@dataclass(frozen=True, slots=True)
class SearchQuery:
    """`vector` is needed in the modes vector and hybrid."""

    question: str
    vector: Vector | None
    filter: Filter | None = None


class Reranker(Protocol):
    """Scores passages against a question, higher is better."""

    async def scores(self, question: str, passages: Sequence[str]) -> list[float]:
        """One for each passage. Raises SluiceError UNAVAILABLE, which names the model."""
        ...


async def search(
    store: Store, collection: str, query: SearchQuery, options: SearchOptions, reranker: Reranker | None = None
) -> list[Hit]:
    """At most `options.top_k` chunks, best first. Raises what the store and the reranker raise."""
    raise NotImplementedError
