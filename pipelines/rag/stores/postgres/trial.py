"""Whether a collection's index finds what comparing all finds: measured on the first questions, not assumed.

HNSW finds nearly all where vectors lie in clusters, as those of texts do, and a fraction where they do not. So the
first questions are answered by comparing all, and the index is asked the same beside it, looking at more each time that
it found too few. Where even its utmost is too little, all are compared for good.
"""

from collections.abc import Collection, Hashable

from pipelines.rag.types import CollectionInfo

MAX_EF_SEARCH = 1000
"""pgvector's bound."""
MIN_RECALL = 0.97
"""Of what comparing all finds. Above the 0.95 that is promised: few questions tell it only roughly."""
_NUM_QUESTIONS = 16
_STEP = 2.5
_GROWTH = 2
"""A collection that has become so many times larger is tried again."""
_MAX_TRIED = 1_000_000
"""Chunks beyond which comparing all takes too long to try: there the index is believed."""


class IndexTrial:
    """Of one collection. `ef_search` is how many chunks its index is to look at; None: compare all."""

    def __init__(self, num_chunks: int, ef_search: int) -> None:
        self.ef_search: int | None = ef_search
        self.is_decided = num_chunks > _MAX_TRIED
        self.num_chunks = num_chunks
        self._recalls: list[float] = []

    def record(self, found: Collection[Hashable], right: Collection[Hashable]) -> None:
        """What the index found, looking at `ef_search`, and what it should have. Of no effect once decided."""
        if self.is_decided or not right or self.ef_search is None:
            return
        self._recalls.append(len(set(found) & set(right)) / len(right))
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
    """Those of one store, whose indexes look at `min_ef_search` at first."""

    def __init__(self, min_ef_search: int) -> None:
        self._min_ef_search = min_ef_search
        self._trials: dict[int, IndexTrial] = {}

    def of(self, id: int, info: CollectionInfo) -> IndexTrial:
        """The present one of the collection with that number."""
        trial = self._trials.get(id)
        if trial is None or info.num_chunks > trial.num_chunks * _GROWTH:
            trial = self._trials[id] = IndexTrial(info.num_chunks, self._min_ef_search)
        return trial
