"""Keeps results diverse: drops chunks that repeat a better one, and ranks by maximal marginal relevance.

A repetition would only take the place of another chunk in the prompt.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from sluice.pipelines.encoding import Vectors
from sluice.pipelines.rag.types import Hit

_RUN_WORDS = 5
"""Consecutive words by which texts are compared: shorter runs coincide by chance."""
_SAME_TEXT = 0.9
"""Share of a text's runs found in another one from which both count as the same text, give or take an edit or two."""
_OVERLAP = 0.5
"""Share of a chunk's characters within another chunk of its document from which it is a repetition.

Neighbours share far less: chunks are cut with an overlap of a seventh of their length.
"""
_WORD = re.compile(r"\w+")
_Run = tuple[str, ...]


def drop_duplicates(hits: Sequence[Hit], limit: int) -> list[Hit]:
    """Return the first `limit` hits that repeat none before them, in order."""
    kept: list[Hit] = []
    index = _RunIndex()
    for hit in hits:
        if len(kept) == limit:
            break
        runs = _split_runs(hit.text)
        if not index.has_text_with(runs) and not any(_overlap(hit, other) for other in kept):
            kept.append(hit)
            index.add(runs)
    return kept


class _RunIndex:
    """Finds texts by their runs of words."""

    def __init__(self) -> None:
        self._num_texts = 0
        self._texts_by_run: defaultdict[_Run, list[int]] = defaultdict(list)

    def add(self, runs: frozenset[_Run]) -> None:
        for run in runs:
            self._texts_by_run[run].append(self._num_texts)
        self._num_texts += 1

    def has_text_with(self, runs: frozenset[_Run]) -> bool:
        """Whether one text contains nearly all of `runs`, however many more it has."""
        shared = Counter(text for run in runs for text in self._texts_by_run.get(run, ()))
        return max(shared.values(), default=0) >= _SAME_TEXT * len(runs)


def _split_runs(text: str) -> frozenset[_Run]:
    words = _WORD.findall(text.casefold())
    return frozenset(tuple(words[start : start + _RUN_WORDS]) for start in range(max(len(words) - _RUN_WORDS + 1, 1)))


def _overlap(hit: Hit, other: Hit) -> bool:
    if hit.document_id != other.document_id:
        return False
    shared = min(hit.end, other.end) - max(hit.start, other.start)
    return shared > 0 and shared >= _OVERLAP * min(hit.end - hit.start, other.end - other.start)


def diversify(hits: Sequence[Hit], limit: int, trade_off: float) -> list[Hit]:
    """Select at most `limit` hits by maximal marginal relevance (Carbonell and Goldstein, 1998), in order of selection.

    Each step selects the hit with the highest `trade_off` * relevance - (1 - `trade_off`) * similarity to the nearest
    selected hit; the earlier one wins a tie. Relevance is the score scaled to 0..1, the range of cosines, so that the
    trade-off means the same after fusion and after a reranker. A hit without a vector is similar to no other.
    """
    if not hits or limit <= 0:
        return []
    vectors = _stack_vectors(hits)
    relevance = _scale_to_unit(np.array([hit.score for hit in hits], np.float64))
    nearest = np.zeros(len(hits))
    is_open = np.ones(len(hits), np.bool_)
    selected: list[int] = []
    while len(selected) < min(limit, len(hits)):
        gains = trade_off * relevance - (1.0 - trade_off) * nearest if selected else relevance
        best = int(np.argmax(np.where(is_open, gains, -np.inf)))
        selected.append(best)
        is_open[best] = False
        nearest = np.maximum(nearest, vectors @ vectors[best])
    return [hits[index] for index in selected]


def _scale_to_unit(scores: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    low, high = scores.min(), scores.max()
    return (scores - low) / (high - low) if high > low else np.ones_like(scores)


def _stack_vectors(hits: Sequence[Hit]) -> Vectors:
    """Return one row for each hit, of zeros for a hit without a vector."""
    dim = next((len(hit.vector) for hit in hits if hit.vector is not None), 1)
    rows = np.zeros((len(hits), dim), np.float32)
    for row, hit in zip(rows, hits, strict=True):
        if hit.vector is not None:
            row[:] = hit.vector
    return rows
