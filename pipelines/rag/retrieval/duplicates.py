"""Chunks that say what a better one has said already: they would only take another one's place in the prompt."""

import re
from collections import Counter, defaultdict
from collections.abc import Sequence

from pipelines.rag.types import Hit

_RUN = 5
"""Words in a row that texts are compared by: fewer come up by chance."""
_SAME = 0.9
"""Share of a text's runs of words that another one has, from which on it is the same text: an edit or two apart."""
_OVERLAP = 0.5
"""Share of a chunk's characters in another chunk of its document from which on it is a repetition.

Neighbours share far less: chunks are cut with an overlap of a seventh of their length.
"""
_WORD = re.compile(r"\w+")
_Run = tuple[str, ...]


def without_duplicates(hits: Sequence[Hit], limit: int) -> list[Hit]:
    """The first `limit` hits that repeat none before them, in order."""
    kept: list[Hit] = []
    told = _Told()
    for hit in hits:
        if len(kept) == limit:
            break
        runs = _runs(hit.text)
        if not told.repeats(runs) and not any(_overlap(hit, other) for other in kept):
            kept.append(hit)
            told.add(runs)
    return kept


class _Told:
    """Which texts have each run of words."""

    def __init__(self) -> None:
        self._num_texts = 0
        self._texts_of: defaultdict[_Run, list[int]] = defaultdict(list)

    def add(self, runs: frozenset[_Run]) -> None:
        for run in runs:
            self._texts_of[run].append(self._num_texts)
        self._num_texts += 1

    def repeats(self, runs: frozenset[_Run]) -> bool:
        """Whether one text has nearly all of `runs`. A text of which that is but a small part repeats nothing."""
        shared = Counter(text for run in runs for text in self._texts_of.get(run, ()))
        return max(shared.values(), default=0) >= _SAME * len(runs)


def _runs(text: str) -> frozenset[_Run]:
    words = _WORD.findall(text.casefold())
    return frozenset(tuple(words[start : start + _RUN]) for start in range(max(len(words) - _RUN + 1, 1)))


def _overlap(hit: Hit, other: Hit) -> bool:
    if hit.document_id != other.document_id:
        return False
    shared = min(hit.end, other.end) - max(hit.start, other.start)
    return shared > 0 and shared >= _OVERLAP * min(hit.end - hit.start, other.end - other.start)
