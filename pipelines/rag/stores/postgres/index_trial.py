"""Measures on a collection's first questions whether its vector index finds what comparing all chunks finds.

HNSW finds nearly all neighbours if vectors lie in clusters, as those of texts do, and a fraction of them if they do
not. So the first questions are answered by comparing all chunks, and searched in the index as well, with a greater
`ef_search` each time that it found too few. If even the greatest finds too few, all chunks are compared from then on.
"""

from collections.abc import Collection, Hashable

from sluice.pipelines.rag.types import CollectionInfo

MAX_EF_SEARCH = 1000
"""pgvector's limit."""
MIN_RECALL = 0.97
"""Required recall of the index. It is above the promised 0.95, since few questions measure it only roughly."""
_NUM_QUESTIONS = 16
_STEP = 2.5
_GROWTH = 2
"""A collection that has grown by this factor is tried again."""
_MAX_TRIED = 1_000_000
"""Chunks beyond which comparing all takes too long for a trial: such an index is trusted."""


class IndexTrial:
    """The trial of one collection's index. `ef_search` None: compare all chunks instead."""

    def __init__(self, num_chunks: int, ef_search: int) -> None:
        self.ef_search: int | None = ef_search
        self.is_decided = num_chunks > _MAX_TRIED
        self.num_chunks = num_chunks
        self._recalls: list[float] = []

    def record(self, found: Collection[Hashable], expected: Collection[Hashable]) -> None:
        """Record what the index found with `ef_search`, and what it should have found. Ignored once decided."""
        if self.is_decided or not expected or self.ef_search is None:
            return
        self._recalls.append(len(set(found) & set(expected)) / len(expected))
        if len(self._recalls) < _NUM_QUESTIONS:
            return
        is_enough = sum(self._recalls) / len(self._recalls) >= MIN_RECALL
        self._recalls.clear()
        if is_enough or self.ef_search == MAX_EF_SEARCH:
            self.is_decided = True
            self.ef_search = self.ef_search if is_enough else None
        else:
            self.ef_search = min(round(self.ef_search * _STEP), MAX_EF_SEARCH)


class IndexTrials:
    """The trials of one store's collections. Each starts with `min_ef_search`."""

    def __init__(self, min_ef_search: int) -> None:
        self._min_ef_search = min_ef_search
        self._trials: dict[int, IndexTrial] = {}

    def find(self, id: int, info: CollectionInfo) -> IndexTrial:
        """Return the current trial of the collection with this id."""
        trial = self._trials.get(id)
        if trial is None or info.num_chunks > trial.num_chunks * _GROWTH:
            trial = self._trials[id] = IndexTrial(info.num_chunks, self._min_ef_search)
        return trial
