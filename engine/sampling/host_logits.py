"""Logits in the host's memory: numpy computes on them, on all cores that it was given."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from sluice.engine.arrays import FloatArray, Ids, Rows
from sluice.engine.runners.base import Draws, Edits, Places
from sluice.engine.sampling.cores import ONE_CORE, Cores, row_blocks, row_picker
from sluice.engine.sampling.draw import draw
from sluice.engine.sampling.logprobs import token_logprobs
from sluice.engine.types import TokenLogprob


class HostLogits:
    """The `Logits` of a runtime that computes on the CPU."""

    __slots__ = ("_cores", "values")

    def __init__(self, values: FloatArray, cores: Cores = ONE_CORE) -> None:
        """`values` are [num_rows, row_size]. They are not copied, and `edit` writes to them."""
        self.values = values
        self._cores = cores

    @property
    def num_rows(self) -> int:
        return len(self.values)

    def argmax(self, rows: Rows) -> tuple[Ids, FloatArray]:
        """See `Logits.argmax`."""
        token_ids = np.empty(len(rows), np.intp)
        pick = row_picker(self.values, rows)

        def work(which: slice) -> None:
            pick(which).argmax(axis=1, out=token_ids[which])

        row_size = self.values.shape[1]
        self._cores.share(row_blocks(len(rows), row_size), len(rows) * row_size // 4, lambda: work)
        return token_ids, self.values[rows, token_ids]

    def draw(self, draws: Draws) -> tuple[Ids, FloatArray]:
        """See `Logits.draw`."""
        return draw(self.values, draws, self._cores)

    def argmax_and_draw(self, rows: Rows, draws: Draws) -> tuple[Ids, FloatArray]:
        """See `Logits.argmax_and_draw`."""
        (likeliest, their_peaks), (drawn, peaks) = self.argmax(rows), self.draw(draws)
        return np.concatenate((likeliest, drawn)), np.concatenate((their_peaks, peaks))

    def edit(self, edits: Edits) -> None:
        """See `Logits.edit`."""
        if edits.added is not None:
            self.values[_index(edits.added)] += edits.added.values
        if edits.repeated is not None:
            self._penalize(edits.repeated)
        if edits.subtracted is not None:
            self.values[_index(edits.subtracted)] -= edits.subtracted.values
        if edits.allowed is not None:
            self._restrict(edits.allowed)
        if edits.banned is not None:
            self.values[_index(edits.banned)] = -np.inf
        for row, mask in edits.masks:
            mask.apply(self.values[row])

    def _penalize(self, repeated: Places) -> None:
        index = _index(repeated)
        scores = self.values[index]
        self.values[index] = np.where(scores > 0, scores / repeated.values, scores * repeated.values)

    def _restrict(self, allowed: Places) -> None:
        index = _index(allowed)
        kept = self.values[index]
        self.values[np.unique(allowed.rows)] = -np.inf
        self.values[index] = kept

    def take(self, rows: Rows) -> "HostLogits":
        """See `Logits.take`."""
        return HostLogits(self.values[rows], self._cores)

    def logprobs(self, rows: Rows, token_ids: NDArray[np.integer], num_top: Sequence[int]) -> list[TokenLogprob]:
        """See `Logits.logprobs`."""
        return token_logprobs(self.values, rows, token_ids, num_top, self._cores)

    def read(self, rows: Rows | None = None) -> FloatArray:
        """See `Logits.read`."""
        return self.values if rows is None else row_picker(self.values, rows)(slice(None))


def _index(places: Places) -> tuple[Rows, NDArray[np.int32]]:
    return places.rows, places.token_ids
